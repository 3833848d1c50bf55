"""Recordings of what drivers tell, and a folder that looks to the witness like /proc."""

from __future__ import annotations

from pathlib import Path

RECORDINGS = Path(__file__).with_name("recordings")


def recording(name: str) -> str:
    return (RECORDINGS / name).read_text(encoding="utf-8")


class FakeProc:
    """Descriptors of processes, by hand: a witness reads links and files there as it does in /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def opens(self, pid: int | str, descriptor: int, text: str, target: str = "/dev/dri/renderD128") -> None:
        for folder in ("fd", "fdinfo"):
            (self.root / str(pid) / folder).mkdir(parents=True, exist_ok=True)
        link = self.root / str(pid) / "fd" / str(descriptor)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        (self.root / str(pid) / "fdinfo" / str(descriptor)).write_text(text, encoding="utf-8")

    def closes(self, pid: int, descriptor: int) -> None:
        for folder in ("fd", "fdinfo"):
            (self.root / str(pid) / folder / str(descriptor)).unlink()
