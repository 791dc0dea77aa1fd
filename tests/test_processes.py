"""Two and four processes train like one: equal noise, each example read once."""

import numpy as np
import pytest
from several_processes import run_processes


@pytest.mark.slow
def test_several_processes_train_like_one(tmp_path):
    (one,) = run_processes(1, tmp_path)
    read = {name for name in one if name.endswith("read")}
    assert len(read) == 2
    for count in (2, 4):
        several = run_processes(count, tmp_path)
        for each in several:
            for name in one.keys() - read:
                np.testing.assert_array_equal(each[name], one[name], err_msg=name)
        for name in read:
            result = np.concatenate([each[name] for each in several])
            np.testing.assert_array_equal(np.sort(result), np.sort(one[name]))
