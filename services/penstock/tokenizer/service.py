"""Loaded state behind the tokenizer's RPCs. No gRPC here."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from penstock.common.checkpoint import model_name, resolve_model
from penstock.common.errors import NotFound, StartupError
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.common.logging import get_logger
from penstock.common.progress import ShowProgress, show_nothing
from penstock.tokenizer.bundle import TokenizerBundle
from penstock.tokenizer.bundle_cache import usual_cache
from penstock.tokenizer.chat_template import ChatTemplates
from penstock.tokenizer.config import TokenizerConfig
from penstock.tokenizer.decode_stream import DecodeLimits, DecodeSession
from penstock.tokenizer.detokenizer_factory import DetokenizerFactory
from penstock.tokenizer.load_bundle import MODEL_FLAG, load_in_child
from penstock.tokenizer.metrics import TokenizerMetrics
from penstock.tokenizer.template_pool import TemplateLimits, TemplatePool
from penstock.tokenizer.tokenizer import Vocabulary, clean_up
from penstock.tokenizer.tools_shown import hides_tools
from penstock.tokenizer.workers import Workers

_log = get_logger("penstock.tokenizer")


@dataclass(frozen=True)
class TokenizerService:
    """Tokenizer, templates and workers of one model."""

    config: TokenizerConfig
    model: str
    vocabulary: Vocabulary
    templates: ChatTemplates
    pool: TemplatePool
    workers: Workers
    detokenizers: DetokenizerFactory
    tokenizer_fingerprint: str
    fingerprint: str
    # The chat template silently leaves out tools.
    hides_tools: bool = False

    def serves(self, model: str) -> bool:
        """True when a request that names `model` is for this tokenizer; the empty name always is."""
        return not model or model == self.model or model in self.config.served_model_name

    def check_model(self, model: str) -> None:
        """Check a request's model. Raises NotFound for another model's name."""
        if not self.serves(model):
            raise NotFound(f"this tokenizer serves another model: {self.model}", reason="MODEL_NOT_FOUND")

    def decode_session(self) -> DecodeSession:
        """Make the state of one DecodeStream call."""
        limits = DecodeLimits(
            self.config.max_sequences, self.config.max_stop_strings, self.config.max_stop_string_chars
        )
        id_limit = self.vocabulary.bundle.id_limit
        return DecodeSession(self.detokenizers, limits, serves=self.serves, id_limit=id_limit)

    async def close(self) -> None:
        """End the template processes and the threads."""
        await self.pool.close()
        await asyncio.get_running_loop().run_in_executor(None, self.workers.close)


async def load_service(
    config: TokenizerConfig, metrics: TokenizerMetrics, show: ShowProgress = show_nothing
) -> TokenizerService:
    """Load and warm up; `show` gets the progress of a download. Raises StartupError naming the file and MODEL."""
    loop = asyncio.get_running_loop()
    folder = await asyncio.to_thread(resolve_model, config.model, show=show)
    cache = usual_cache(config.cached_tokenizers)
    bundle, child = await load_in_child(folder, timeout_seconds=config.load_timeout_seconds, cache=cache)
    try:
        vocabulary = await loop.run_in_executor(None, _vocabulary, folder, bundle)
        templates = ChatTemplates(
            bundle.templates,
            bundle.special_tokens,
            vocabulary.marks,
            # A tokenizer that splits special tokens makes no control ids from text, not even from the template's own.
            protect=not (config.allow_control_tokens_in_content or bundle.split_special_tokens),
        )
        pool = TemplatePool(templates.renderer_settings, _template_limits(config), metrics)
        workers = Workers(
            vocabulary,
            metrics,
            small=config.workers,
            large=config.large_workers,
            large_bytes=config.large_text_bytes,
            max_queued=config.max_queued_requests,
            inline_bytes=config.inline_encode_bytes,
        )
    except BaseException:
        await child.kill()
        raise
    try:
        await pool.start(child)
        detokenizers = await loop.run_in_executor(None, _detokenizers, vocabulary)
        await workers.run(0, lambda tokenizer: tokenizer.encode_rendered("warm up", None))
        hides = await hides_tools(templates, pool.render)
    except BaseException:
        await pool.close()
        workers.close()
        raise
    own = tokenizer_fingerprint(folder)
    if hides:
        _log.warning("the chat template does not show tools to models", model=config.model)
    return TokenizerService(
        config=config,
        model=(*config.served_model_name, model_name(config.model))[0],
        vocabulary=vocabulary,
        templates=templates,
        pool=pool,
        workers=workers,
        detokenizers=detokenizers,
        tokenizer_fingerprint=own,
        fingerprint=_fingerprint(own, vocabulary),
        hides_tools=hides,
    )


def _vocabulary(folder: Path, bundle: TokenizerBundle) -> Vocabulary:
    try:
        return Vocabulary(bundle)
    except ValueError as error:
        raise StartupError(f"{folder / 'tokenizer.json'}: {error}; check {MODEL_FLAG}", flag=MODEL_FLAG) from error


def _detokenizers(vocabulary: Vocabulary) -> DetokenizerFactory:
    bundle = vocabulary.bundle
    return DetokenizerFactory(
        vocabulary.tokenizer,
        id_limit=bundle.id_limit,
        special_ids=vocabulary.special_ids,
        clean_up=clean_up if bundle.clean_up_tokenization_spaces else None,
    )


def _template_limits(config: TokenizerConfig) -> TemplateLimits:
    return TemplateLimits(
        processes=config.template_processes,
        pipeline=config.template_pipeline,
        max_queued=config.max_queued_requests,
        seconds=config.template_timeout_seconds,
        memory_bytes=config.template_memory_bytes,
        start_seconds=config.load_timeout_seconds,
    )


def _fingerprint(tokenizer: str, vocabulary: Vocabulary) -> str:
    """Hash (sha256) of the loaded tokenizer and its templates, each after its name."""
    digest = hashlib.sha256(tokenizer.encode() or vocabulary.bundle.backend.encode())
    for name, source in sorted(vocabulary.bundle.templates.items()):
        digest.update(f"\0{name}\0{source}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
