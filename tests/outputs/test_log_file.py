"""A compressed log: frames one behind the other, and what is left of them where something is wrong."""

from __future__ import annotations

import io

import pytest

from detgen.outputs.log_file import DamagedError, TornError, contents, frame_of

PARTS = [b"".join(b'{"index":%d,"part":%d}\n' % (i, part) for i in range(3000)) for part in range(3)]
WHOLE = b"".join(map(frame_of, PARTS))


def read(data: bytes, name: str = "acceptance.jsonl.zst") -> tuple[bytes, bytes, Exception | None]:
    """What it holds, its own bytes as they were seen, and what was wrong."""
    found, seen = bytearray(), bytearray()
    try:
        for block in contents(io.BytesIO(data), name, seen.extend):
            found += block
    except DamagedError as error:
        return bytes(found), bytes(seen), error
    return bytes(found), bytes(seen), None


@pytest.mark.parametrize(("name", "data"), [("a.zst", WHOLE), ("a.jsonl", b"".join(PARTS)), ("a.zst", b"")])
def test_all_of_a_file_is_read(name: str, data: bytes) -> None:
    assert read(data, name) == (b"".join(PARTS) if data else b"", data, None)


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_file_that_ends_in_the_middle_has_what_comes_before(cut: int) -> None:
    found, seen, error = read(WHOLE[:-cut])
    assert isinstance(error, TornError)
    assert b"".join(PARTS).startswith(found)
    assert len(found) >= len(PARTS[0] + PARTS[1])
    assert seen == WHOLE[:-cut]


@pytest.mark.parametrize("at", range(0, len(WHOLE), max(1, len(WHOLE) // 97)))
def test_a_changed_byte_is_never_other_lines_in_silence(at: int) -> None:
    changed = bytes([*WHOLE[:at], WHOLE[at] ^ 1, *WHOLE[at + 1 :]])
    found, seen, error = read(changed)
    assert error is not None or found == b"".join(PARTS)
    assert seen == changed


def test_what_is_no_frame_is_damaged() -> None:
    _, _, error = read(b"plain lines\n" * 50)
    assert isinstance(error, DamagedError)
    assert not isinstance(error, TornError)
