"""Table of safeguards: for each promise of docs/guide/reliability.md some text of the source that keeps it, and a test
that must fail without it. `tools/remove_safeguards.py` removes them one by one."""

from __future__ import annotations

from dataclasses import dataclass

_PENSTOCK = "services/penstock/"


@dataclass(frozen=True)
class Safeguard:
    """A row. `text` occurs once in `file`; with `instead` in its place `test` fails, as it does not before."""

    name: str
    file: str
    text: str
    instead: str
    # As pytest is given it.
    test: str


SAFEGUARDS = (
    Safeguard(
        "a request that would be late is refused by the engine",
        _PENSTOCK + "generation/engine/acceptance.py",
        "late = pace.seconds_late(demand, left, coming) if must_end_in_time(request) else 0.0",
        "late = 0.0",
        "tests/unit/generation/engine/test_overload.py"
        "::test_three_times_the_capacity_keeps_the_goodput_and_refuses_the_rest",
    ),
    Safeguard(
        "expired work is never prefilled",
        _PENSTOCK + "generation/engine/engine.py",
        "self._end_times.too_late(now)",
        "()",
        "tests/unit/generation/engine/test_overload.py::test_expired_work_is_never_prefilled",
    ),
    Safeguard(
        "a tenant's flood loses its own place in the router's queue",
        _PENSTOCK + "router/frontend/admission.py",
        "            self._shed(tenant)\n",
        "            raise self._full()\n",
        "tests/unit/router/frontend/test_admission.py::test_flood_cannot_fill_the_queue_against_others",
    ),
    Safeguard(
        "a tenant leaves others a part of the running sequences",
        _PENSTOCK + "generation/engine/scheduler.py",
        "            most = self.shares.running_sequences",
        "            most = self._config.max_running_sequences",
        "tests/unit/generation/engine/test_overload.py"
        "::test_a_tenant_has_its_share_of_running_sequences_while_there_are_others",
    ),
    Safeguard(
        "the watchdog tells of a step that hangs",
        _PENSTOCK + "generation/delivery/watchdog.py",
        "is_hung = view.is_hung and self._suspect == view.began",
        "is_hung = False",
        "tests/unit/generation/delivery/test_watchdog.py::test_the_alarm_is_raised_and_ends_with_the_step",
    ),
    Safeguard(
        "a session that is silent costs its backend",
        _PENSTOCK + "router/backends/backend.py",
        "                self._watch_session(session),\n",
        "",
        "tests/integration/router/test_stalls.py::test_reports_are_no_sign_of_life_of_a_session[session dark]",
    ),
    Safeguard(
        "frames of another epoch are dropped",
        _PENSTOCK + "router/backends/session.py",
        "if attempt is None or attempt.epoch != event.attempt_epoch:",
        "if attempt is None:",
        "tests/integration/router/test_failover.py::test_frames_of_another_epoch_are_dropped",
    ),
    Safeguard(
        "tokens out of order are not taken",
        _PENSTOCK + "router/backends/session.py",
        "            if seq != attempt.expected_seq:\n"
        "                self._break_off(attempt, _out_of_order(attempt, seq))\n"
        "                continue\n",
        "",
        "tests/integration/router/test_lies.py::test_no_lie_ends_with_ok[a frame in the middle is missing-asyncio]",
    ),
    Safeguard(
        "a backend makes no more tokens than were asked for",
        _PENSTOCK + "router/backends/session.py",
        "            if seq >= attempt.end_seq:\n"
        '                self._break_off(attempt, "more tokens than were asked for")\n'
        "                continue\n",
        "",
        "tests/integration/router/test_lies.py::test_no_lie_ends_with_ok[more tokens than asked for-asyncio]",
    ),
    Safeguard(
        "a request is poison only after crashes",
        _PENSTOCK + "router/requests/suspect.py",
        "return self.is_confirmed is not False and not self.is_explained",
        "return not self.is_explained",
        "tests/unit/router/backends/test_crash_log.py::test_nothing_is_held_against_it_before_it_is_known",
    ),
    Safeguard(
        "a poison request ends",
        _PENSTOCK + "router/backends/attempts.py",
        '            raise Internal("every backend that ran this request died", reason="POISON")\n',
        "",
        "tests/integration/router/test_failover.py::test_request_that_kills_two_backends_is_not_tried_a_third_time",
    ),
    Safeguard(
        "a stream is moved a limited number of times",
        _PENSTOCK + "router/backends/attempts.py",
        "if begun and state.moves >= self._config.max_moves + excused:",
        "if begun and state.moves > 9 + excused:",
        "tests/integration/router/test_failover.py::test_only_so_many_moves",
    ),
    Safeguard(
        "retries have a budget",
        _PENSTOCK + "router/backends/attempts.py",
        "        self._left -= 1.0\n",
        "",
        "tests/integration/router/test_refusals.py::test_retries_keep_to_their_budget",
    ),
    Safeguard(
        "a backend that fails again and again is ejected",
        _PENSTOCK + "router/backends/outliers.py",
        '            self._eject(key, record, "consecutive")\n',
        "            pass\n",
        "tests/unit/router/backends/test_outliers.py::test_failures_in_a_row",
    ),
    Safeguard(
        "the last backend is never ejected",
        _PENSTOCK + "router/backends/outliers.py",
        "if key not in peers or out + 1 > most or out + 1 >= len(peers):",
        "if key not in peers or out + 1 > most:",
        "tests/integration/router/test_ejection.py::test_the_last_backend_is_never_ejected",
    ),
    Safeguard(
        "a message's fields are counted before they are made",
        _PENSTOCK + "serving/interceptors.py",
        "            deserializer = bounded(deserializer, most)\n",
        "",
        "tests/integration/router/test_bombs.py"
        "::test_millions_of_empty_messages_are_refused_before_they_are_made[asyncio]",
    ),
    Safeguard(
        "a call's token is looked at when its headers come",
        _PENSTOCK + "http2/server.py",
        "            if self._admit is None or self._admit(call.method, call.invocation_metadata()):\n"
        "                call.trust()\n",
        "            call.trust()\n",
        "tests/integration/serving/test_strangers.py"
        "::test_a_call_without_a_token_is_refused_before_its_request_has_come[asyncio]",
    ),
    Safeguard(
        "connections without a token make room for one another",
        _PENSTOCK + "http2/strangers.py",
        "        self.discard(oldest)\n        self._on_evicted()\n        oldest.evict()\n",
        "",
        "tests/unit/http2/test_strangers.py::test_of_too_many_the_oldest_without_calls_goes_and_then_the_oldest",
    ),
    Safeguard(
        "calls that are opened and reset without end cost their connection",
        _PENSTOCK + "http2/server_connection.py",
        '                self._idle_frames.spend("early resets of calls without an answer")\n',
        "                pass\n",
        "tests/unit/http2/test_connection.py::test_calls_opened_and_reset_at_once_without_end_end_the_connection",
    ),
    Safeguard(
        "a library of kernels that others could have written is not loaded",
        _PENSTOCK + "generation/devices/native/build.py",
        "    reason = obstacle(library, cache)\n",
        "    reason = None\n",
        "tests/unit/generation/devices/native/test_trust.py::test_what_others_could_write_is_not_loaded",
    ),
    Safeguard(
        "blocks without numbers leave the cache",
        _PENSTOCK + "generation/engine/engine.py",
        "            self._scheduler.disown(group)\n",
        "",
        "tests/unit/generation/engine/test_shared_prefixes.py"
        "::test_blocks_of_a_request_without_numbers_leave_the_prefix_cache",
    ),
    Safeguard(
        "prefixes are shared within a tenant only",
        _PENSTOCK + "common/block_hashes.py",
        "hashlib.sha256(_DOMAIN + known.encode()).digest()",
        "hashlib.sha256(_DOMAIN).digest()",
        "tests/unit/generation/engine/test_scheduler.py::test_prefixes_are_not_shared_between_salts",
    ),
    Safeguard(
        "options that are not known are refused",
        _PENSTOCK + "generation/wire/convert.py",
        "            refuse_unknown_fields(getattr(message, name), name)\n",
        "            pass\n",
        "tests/unit/generation/wire/test_convert.py::test_options_of_another_release_are_refused_by_their_number",
    ),
    Safeguard(
        "the bytes of a prompt's end are no answer",
        _PENSTOCK + "text/text_decoder.py",
        "self._detokenizer.begin(prefix, is_cut=is_cut, with_open_end=with_open_end)",
        "self.push(prefix)",
        "tests/unit/tokenizer/test_decode_stream.py::test_bytes_of_the_prompt_are_no_answer_and_match_no_stop_string",
    ),
    Safeguard(
        "text never makes a control token",
        _PENSTOCK + "tokenizer/tokenizer.py",
        "tokenizer = self._plain if marked is None else self._content",
        "tokenizer, marked = self._plain, None",
        "tests/unit/tokenizer/test_control_tokens.py::test_no_text_in_any_field_makes_a_control_id",
    ),
    Safeguard(
        "plaintext stays on loopback",
        _PENSTOCK + "common/config.py",
        "if not (self.is_tls or self.insecure_bind or is_loopback(self.host)):",
        "if False:",
        "tests/unit/common/test_config.py::test_plaintext_elsewhere_is_refused_without_the_flag",
    ),
)
