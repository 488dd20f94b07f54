"""Every misuse we could think of is refused with a clear error or survived: none is silent, none loses data."""

import importlib
from pathlib import Path

import pytest
from abuse import SITUATIONS

for file in sorted((Path(__file__).parent / "abuse").glob("[a-z]*.py")):
    importlib.import_module(f"abuse.{file.stem}")


def marked(case):
    return pytest.param(
        case, id=f"{case.area}: {case.words}", marks=[getattr(pytest.mark, name) for name in case.marks]
    )


@pytest.mark.parametrize("case", list(map(marked, SITUATIONS)))
def test_refused_by_name_or_survived(case, tmp_path):
    if case.error is None:
        case.act(tmp_path)
        return
    with pytest.raises(case.error, match=case.match) as caught:
        case.act(tmp_path)
    assert len(str(caught.value)) < 1000  # a few sentences, not a dump
