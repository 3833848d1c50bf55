"""Did the engine compute the right thing? Its tokens against a reference that another program computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_colibri.claims.engine import Statement
from pytest_colibri.errors import UsageError
from pytest_colibri.judge.model import Verdict

REFERENCE_FILE = "ref_glm.json"


@dataclass(frozen=True)
class TokenReference:
    """The right answer for one model. ``full`` is the prompt and the greedy tokens after it; ``best`` the
    best token at each position of ``full``; ``source`` says who computed them."""

    prompt: tuple[int, ...]
    full: tuple[int, ...]
    best: tuple[int, ...]
    source: str

    @property
    def generated(self) -> tuple[int, ...]:
        """The greedy tokens without the prompt."""
        return self.full[len(self.prompt) :]


def read_token_reference(path: Path) -> TokenReference:
    """Read ``prompt_ids``, ``full_ids`` and ``tf_pred`` of a file; :class:`UsageError` says what is off."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        prompt, full, best = (
            tuple(int(token) for token in fields[key]) for key in ("prompt_ids", "full_ids", "tf_pred")
        )
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path}: not a token reference ({error}); wanted: a JSON object whose prompt_ids, full_ids and "
            "tf_pred are lists of integers"
        ) from None
    if full[: len(prompt)] != prompt or len(best) != len(full) or not prompt:
        raise UsageError(f"{path}: full_ids must begin with prompt_ids and be as many as tf_pred")
    return TokenReference(prompt, full, best, str(fields.get("source", path.name)))


def judge_generated(
    statement: Statement,
    prompt_length: int,
    wanted: Sequence[int],
    source: str,
    title: str = "generated tokens",
) -> Verdict:
    """Judge the greedily generated tokens, position by position; the first follows the prompt."""
    first = statement.first_position
    if first not in (None, prompt_length):
        place = str(statement.tokens_place)
        reason = f"the first token is at position {first}, and the prompt ends before {prompt_length}"
        return Verdict("broken", title, place, f"{len(statement.tokens)} tokens", "", source, reason=reason)
    return _judge(title, statement, statement.tokens, wanted, source)


def judge_scored(statement: Statement, wanted: Sequence[int], source: str) -> Verdict:
    """Judge the best token at each position of a given text (teacher forcing)."""
    return _judge("scored positions", statement, statement.scores or (), wanted, source)


def _judge(
    title: str, statement: Statement, got: Sequence[int], wanted: Sequence[int], source: str
) -> Verdict:
    place = str(statement.tokens_place or "")
    equal = sum(a == b for a, b in zip(got, wanted, strict=False))
    advertised, witnessed = f"{len(got)} tokens", f"{equal}/{len(wanted)} as the reference"
    if tuple(got) == tuple(wanted):
        return Verdict("held", title, place, advertised, witnessed, source)
    return Verdict("broken", title, place, advertised, witnessed, source, reason=_difference(got, wanted))


def _difference(got: Sequence[int], wanted: Sequence[int]) -> str:
    for position, (a, b) in enumerate(zip(got, wanted, strict=False)):
        if a != b:
            return f"first difference at position {position}: {a} instead of {b}"
    return f"{len(got)} tokens instead of {len(wanted)}"
