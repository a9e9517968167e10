from __future__ import annotations

from detgen.show.screen import clock, open_output, size


def test_clock_and_size() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]
    assert [size(number) for number in (12, 2048, 412 * 2**20, 3 * 2**40)] == [
        "12 bytes",
        "2.0 KiB",
        "412.0 MiB",
        "3072.0 GiB",
    ]


def test_tables_are_wide_where_there_is_no_terminal() -> None:
    assert (open_output().width, open_output(160).width) == (120, 160)
