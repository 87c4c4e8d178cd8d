"""Pictures of `pspo report` and of the documentation: colours, intervals, axes, text."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from pspo_lab import figures
from pspo_lab.figures import COLOURS, OTHERS_COLOUR
from pspo_lab.view_data import surrogate_classes

T2 = 4.302652729911275 / math.sqrt(3)  # Student's t, 2 degrees of freedom, two-sided 95%: any table


@pytest.fixture
def saved(monkeypatch):
    """The figures as they are saved, to empty files: rendering takes longer than all else here."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (found.append(figure), Path(path).touch()))
    return found


def curves(rows, seeds=3, method="PSPO"):
    steps = range(2, 12, 2)
    return pd.DataFrame(
        {"panel": panel, "row": f"PSPO (alpha={row})", "method": method, "seed": seed, "x": x,
         "y": math.sin(x + row) + seed / 9}
        for panel in ("reward", "ess") for row in range(rows) for seed in range(seeds) for x in steps
    )  # fmt: skip


def test_a_method_has_one_colour_and_its_settings_are_shades_of_it():
    rows = {"Clip": "Clip", "a": "PSPO", "b": "PSPO", "c": "PSPO", "mine": "my_loss.Mine"}
    found = figures.styles(rows)
    assert [found[row]["color"] for row in ("Clip", "b")] == [COLOURS[name].lower() for name in ("Clip", "PSPO")]
    assert len({style["color"] for style in found.values()}) == 5
    assert len({str(found[row]["ls"]) for row in "abc"}) == 3
    parts = [[int(found[row]["color"][i : i + 2], 16) for i in (1, 3, 5)] for row in "abc"]
    assert all(dark <= middle <= light for dark, middle, light in zip(*parts, strict=True))
    assert len({*COLOURS.values(), OTHERS_COLOUR}) == len(COLOURS) + 1
    assert set(COLOURS) == set(surrogate_classes())


@pytest.mark.parametrize("rows", [2, 6])
def test_up_to_six_settings_share_axes_and_one_legend_in_the_order_of_their_ends(tmp_path, saved, rows):
    assert figures.draw_curves(curves(rows), "step", tmp_path / "a.svg") == [tmp_path / "a.svg"]
    (legend,) = saved[0].legends
    names = [text.get_text() for text in legend.get_texts()]
    for axes in saved[0].axes:
        lines = dict(zip((f"PSPO (alpha={row})" for row in range(rows)), axes.get_lines(), strict=True))
        assert set(names) == set(lines)
        ends = [lines[name].get_ydata()[-1] for name in names]
        assert ends == sorted(ends, reverse=True)
        for row, band in enumerate(axes.collections):  # 95% t-intervals over seeds, inside the axes
            x, y = band.get_paths()[0].vertices.T
            assert np.allclose(abs(y - np.sin(x + row) - 1 / 9), T2 / 9)
            assert axes.get_ylim()[0] < y.min() < y.max() < axes.get_ylim()[1]
