"""Examples are taken by position, also from pandas objects."""

import functools

import jax
import numpy as np
import pandas as pd
import pytest

import dpjax

KEY = jax.random.wrap_key_data(np.array([0, 3], np.uint32))


def _make_shuffled_table():
    """Rows in another order than their labels, as `df.sample(frac=1)` leaves them."""
    table = pd.DataFrame(
        {
            "x": np.arange(6, dtype=np.float32),
            "y": np.arange(6) * 10,
            "user": ["a", "a", "b", "b", "c", "c"],
        }
    )
    return table.iloc[[5, 0, 3, 1, 4, 2]]


@functools.cache
def _make_plan(num_examples):
    return dpjax.plan(
        num_examples=num_examples,
        batch_size=3,
        num_steps=4,
        noise_multiplier=1.3,
        delta=1e-5,
        clip_norm=0.7,
        sampling="fixed",
        adjacency=dpjax.Adjacency.REPLACE,
    )


def test_by_user_groups_shuffled_series_by_position():
    table = _make_shuffled_table()
    users = dpjax.by_user(table["x"], table["user"], max_examples=2)
    expected = table.groupby("user", sort=False)["x"].apply(list)
    for user, values in zip(range(3), expected, strict=True):
        np.testing.assert_array_equal(users[user].examples, values)
    np.testing.assert_array_equal(users.stacked().examples, np.stack(expected))


def test_batches_pair_series_and_arrays_by_position():
    table = _make_shuffled_table()
    data = (table["x"], table["y"].to_numpy(), table[["x", "y"]])
    for batch in _make_plan(6).batches(data, key=KEY):
        x, y, both = batch.data
        np.testing.assert_array_equal(x * 10, y)
        np.testing.assert_array_equal(both[:, 0], x)
        np.testing.assert_array_equal(both[:, 1], y)


def test_load_and_batches_read_the_same_table_rows():
    table = _make_shuffled_table()
    arrays = {name: table[name].to_numpy() for name in ("x", "y")}
    plan = _make_plan(6)
    load = jax.jit(lambda step: plan.load(arrays, step, KEY))
    batches = plan.batches(dict(table[["x", "y"]].items()), key=KEY)
    for step, batch in enumerate(batches):
        expected = load(step).data
        jax.tree.map(np.testing.assert_array_equal, batch.data, expected)


def test_parts_of_a_series_batch_are_taken_by_position():
    table = _make_shuffled_table()
    batch = dpjax.Examples(table["x"], np.ones(6, bool))
    parts = [part.data for part in batch.parts(2)]
    np.testing.assert_array_equal(np.concatenate(parts), table["x"].to_numpy())


def test_series_of_strings_raises_with_its_name():
    table = _make_shuffled_table()
    data = {"x": table["x"], "name": table["user"]}
    with pytest.raises(ValueError, match=r"\['name'\], a pandas.*Series"):
        next(_make_plan(6).batches(data, key=KEY))
    with pytest.raises(ValueError, match=r"\['name'\], a pandas.*Series"):
        dpjax.by_user(data, table["user"], max_examples=2)


_NAN = float("nan")
_RECORDS = np.array(
    [("a", _NAN)] * 3 + [("b", _NAN)] * 3, [("name", "U1"), ("k", "f8")]
)


@pytest.mark.parametrize(
    "users",
    [
        pd.MultiIndex.from_arrays([["a", "b"] * 3, [_NAN] * 6]),
        [("a", float("nan")) for _ in range(6)],
        [frozenset([float("nan")]) for _ in range(6)],
        pd.Series(["a", pd.NA] * 3, dtype="string"),
        np.ma.array([0, 1, 2] * 2, mask=[True] + [False] * 5),
        _RECORDS,
    ],
    ids=["multi-index", "tuples", "frozensets", "missing", "masked", "records"],
)
def test_nan_owners_raise(users):
    with pytest.raises(ValueError, match="Replace missing owners by a name"):
        dpjax.by_user(np.arange(6.0), users, max_examples=2)


def test_tuples_and_records_may_be_owners():
    tuples = [("a", 1), ("b", 1), ("a", 1), ("a", 2)]
    records = np.array(tuples, [("name", "U1"), ("k", "i8")])
    for users in (tuples, records, pd.MultiIndex.from_tuples(tuples)):
        result = dpjax.by_user(np.arange(4.0), users, max_examples=2)
        assert [sorted(set(result[i].examples)) for i in range(3)] == [[0, 2], [1], [3]]


def test_masked_arrays_and_durations_raise():
    masked = np.ma.array(np.arange(6.0), mask=[True] + [False] * 5)
    durations = pd.Series(pd.to_timedelta(range(6), unit="s"))
    for data in (masked, durations):
        with pytest.raises(ValueError, match="arrays"):
            next(_make_plan(6).batches(data, key=KEY))
    with pytest.raises(ValueError, match="tree of arrays"):
        dpjax.by_user([1.0, 2.0], ["a", "b"], max_examples=2)
