"""How an engine run ended and conducted itself: what to know before anything else about it is judged."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_colibri.claims.engine import Statement
from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.witness.evidence import Output


def judge_ending(statement: Statement, output: Output) -> Verdict:
    """Judge whether the engine did what it was asked to, refused it, or broke off.

    A refusal claims nothing. A run that we ended shows nothing about the engine's work: it may hang or be
    slow, and the memory verdicts speak of the floor.
    """
    if output.survivors:
        reason = f"processes that it started could not be ended: {', '.join(output.survivors)}"
        return _ending("broken", output, reason)
    if output.truncated:
        return _ending("unwitnessed", output, "its output is too long to be kept whole")
    if output.ended == "timeout":
        return _ending("unwitnessed", output, out_of_time(output))
    if output.ended == "floor":
        return _ending("unwitnessed", output, "stopped at the memory floor, before it was done")
    if statement.refused is not None:
        return _ending("not_claimed", output, f"the engine refused the request: {statement.refused}")
    if output.status != 0 or not statement.complete:
        what = "it failed" if output.status != 0 else "its last event is not its end"
        last = next((line for line in reversed(output.stderr) if line.strip()), "nothing on standard error")
        return _ending("broken", output, f"{what}; last words: {last}")
    return _ending("held", output, "")


def out_of_time(output: Output) -> str:
    """Say that a run was ended at its timeout, and what to do."""
    seconds = output.wall_us / 10**6
    return f"no end after {seconds:.1f} s; its processes were killed (--colibri-timeout gives it more time)"


def _ending(state: State, output: Output, reason: str) -> Verdict:
    ended = f"signal {-output.status}" if output.status < 0 else f"exit status {output.status}"
    return Verdict(state, "run completes", "engine", "everything asked for", ended, "process", reason=reason)


def judge_protocol(statement: Statement) -> Verdict:
    """Judge whether every event of the engine could be read; a wrong one may hide what it should say."""
    title, wrong = "protocol", statement.malformed
    if wrong:
        places = ", ".join(str(place) for place in wrong[:3])
        reason = f"events that are not as docs/engine-protocol.md says: {places}"
        witnessed = f"{len(wrong)} wrong events"
        return Verdict("broken", title, places, "engine protocol", witnessed, "process", reason=reason)
    return Verdict("held", title, "stdout", "engine protocol", "every event read", "process")


def judge_model_folder(changes: Sequence[str]) -> Verdict:
    """Judge whether the run left the model folder as it was; ``changes`` names the files that it did not."""
    title, witness = "model folder", "file times"
    if changes:
        reason = f"the engine changed {', '.join(changes)}"
        return Verdict("broken", title, "engine", "only read", "changed", witness, reason=reason)
    return Verdict("held", title, "engine", "only read", "no file changed", witness)
