"""The compiled part of the header scan; see ``_headers.c``. It is absent where no compiler was at hand."""

from collections.abc import Iterable

def add_up(
    shards: Iterable[tuple[bytes, int]],
    patterns: tuple[bytes, ...],
    dtypes: tuple[tuple[bytes, int], ...],
    /,
) -> tuple[int, list[tuple[int, int, int, int]]] | None:
    """Check the headers of a container and add up the bytes of its tensors.

    ``shards`` gives each header with the bytes of the payload behind it, ``patterns`` the texts of at most 8
    ``NamePattern``, ``dtypes`` the bits of an element by dtype. Returns the number of tensors, and groups of
    tensors that follow one another: the first pattern that they match, or -1; its numbers, 0 where it has
    fewer than two; their bytes. The groups of one pattern and its numbers may be several.

    Returns None where it cannot tell: then the headers are faulty, or just not plain.
    """
