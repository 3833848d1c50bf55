"""How an engine run ended: the first thing to know before anything else about it is judged."""

from __future__ import annotations

from pytest_colibri.claims.engine import Statement
from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.witness.evidence import Output

TITLE = "run completes"


def judge_ending(statement: Statement, output: Output) -> Verdict:
    """Judge whether the engine did what it was asked to, refused it, or broke off.

    A refusal claims nothing. A run that the memory guard ended shows nothing about the engine's work; the
    memory verdicts speak of the floor.
    """
    if output.ended == "timeout":
        return _verdict(
            "broken", output, f"no end after {output.wall_us // 10**6} s; its processes were killed"
        )
    if output.ended == "floor":
        return _verdict("unwitnessed", output, "stopped at the memory floor, before it was done")
    if statement.refused is not None:
        return _verdict("not_claimed", output, f"the engine refused the request: {statement.refused}")
    if output.status != 0 or not statement.complete:
        last = next((line for line in reversed(output.stderr) if line.strip()), "nothing on standard error")
        return _verdict("broken", output, f"ended before it was done; last words: {last}")
    return _verdict("held", output, "")


def _verdict(state: State, output: Output, reason: str) -> Verdict:
    ended = f"signal {-output.status}" if output.status < 0 else f"exit status {output.status}"
    return Verdict(state, TITLE, "engine", "everything asked for", ended, "process", reason=reason)
