"""The data behind the pictures of the documents."""

from pathlib import Path

import pyarrow
from pyarrow import parquet

from benchmarks.lab.pictures import write_windows
from swarmd.lab.results import TABLE


def test_a_window_is_the_mean_over_nodes_seeds_and_preceding_rounds(tmp_path: Path) -> None:
    rows = [
        {
            "setting": setting,
            "seed": seed,
            "node": node,
            "round": number,
            "reward": rewards[number - 1] + node if number else None,
        }
        for seed in (1, 2)
        for setting, rewards in (("8/0", (0.0, 1.0, 2.0, 4.0)), ("4/4", (0.5,) * 4))
        for number in range(5)
        for node in (0, 1)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / TABLE)
    write_windows(tmp_path, tmp_path / "long.csv", window=2, step=1)
    assert (tmp_path / "long.csv").read_text().split() == [
        "round,8/0,4/4",
        "2,1.000,1.000",
        "3,2.000,1.000",
        "4,3.500,1.000",
    ]
