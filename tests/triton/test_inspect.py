"""The table of `python -m rise_kernels.inspect`, whose lines the documentation shows; what it compiles is replaced."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rise_kernels import inspect

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
REPORTS = [
    inspect.Report("forward", "fused", 90, "bf16", "128x256x64 w8 s3", 195, 0, 180_736, wgmma=16, tcgen05=0, mma=0),
    inspect.Report("forward", "fused", 100, "bf16", "128x128x64 w8 s4", 231, 0, 147_968, wgmma=0, tcgen05=4, mma=0),
    inspect.Report("dlogits", "softcap", 90, "bf16", "", 106, 0, 0, wgmma=0, tcgen05=0, mma=0),
]


@pytest.fixture
def printed(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(inspect, "INTERPRETED", False)
        monkeypatch.setattr(inspect, "jobs", lambda architectures: [r for r in REPORTS if r.arch in architectures])
        monkeypatch.setattr(inspect, "compile_job", lambda report: report)
        monkeypatch.setattr(sys, "argv", ["inspect", *arguments])
        inspect.main()
        return capsys.readouterr().out

    return run


def test_table(printed):
    header, *lines = printed().splitlines()
    assert len(lines) == len(REPORTS)
    documented = [line.split() for line in DOCS.read_text().splitlines()]
    assert not [line for line in (header, *lines) if line.split() not in documented]
    for title in ("registers", "stack", "shared KiB"):
        end = header.index(title) + len(title)
        assert all(line[end - 1].isdigit() and line[end] == " " for line in lines)
    assert len(printed("--arch", "90").splitlines()) == 3


def test_json(printed):
    assert [inspect.Report(**fields) for fields in json.loads(printed("--json"))] == REPORTS
