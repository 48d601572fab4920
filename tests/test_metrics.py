"""Metrics over all workers are those of all data in one place, however it is spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_job

import fleet as fleet_module
from fleet import Fleet
from fleet.errors import ArgumentTypeError, ConfigurationError, PlanMismatchError
from fleet.metrics import BUCKETS, Metrics

#: How many samples each of the workers has.
SHARES = [(40,), (30, 11), (0, 25), (1, 0, 99), (0, 0, 0)]


def in_job(body: Callable[[Metrics, int], Any], workers: int, servers: int = 1) -> list[Any]:
    def joined_body(fleet: Fleet, worker: int) -> Any:
        fleet.distributed_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0))
        fleet.init_worker()
        return body(fleet.metrics, worker)

    return run_job(joined_body, workers, servers)


def sklearn_metrics() -> Any:
    """Imported when it is asked, as it takes seconds."""
    import sklearn.metrics

    return sklearn.metrics


def local() -> Metrics:
    """Of one worker alone, without a job."""
    return Metrics(lambda call: lambda value, output, op: value)


def spread(shares: tuple[int, ...], *arrays: np.ndarray[Any, Any]) -> list[list[np.ndarray[Any, Any]]]:
    """For each worker its part of every array."""
    parts = [np.split(array, np.cumsum(shares)[:-1]) for array in arrays]
    return [[part[worker] for part in parts] for worker in range(len(shares))]


def kinds(worker: int) -> Callable[[np.ndarray[Any, Any]], Any]:
    """Workers need not have their data in the same kind."""
    return [lambda array: array, torch.from_numpy, lambda array: array.tolist()][worker % 3]


# --- Of predictions and labels ----------------------------------------------------------------------------------------


@pytest.mark.pairs(1)
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_regression_is_that_of_the_pooled_data(shares: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    predictions, labels = rng.normal(size=sum(shares)), rng.normal(size=sum(shares))
    parts = spread(shares, predictions, labels)

    def body(metrics: Metrics, worker: int) -> list[float]:
        x, y = (kinds(worker)(part) for part in parts[worker])
        return [metrics.mae(x, y), metrics.mse(x, y), metrics.rmse(x, y)]

    want = [math.nan] * 3
    if sum(shares):
        mse = sklearn_metrics().mean_squared_error(labels, predictions)
        want = [sklearn_metrics().mean_absolute_error(labels, predictions), mse, math.sqrt(mse)]
    for got in in_job(body, len(shares)):
        assert [type(each) for each in got] == [float] * 3
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_accuracy_is_that_of_the_pooled_data(shares: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    size = sum(shares)
    probabilities, binary = rng.uniform(size=size).round(1), rng.integers(0, 2, size)
    scores, classes = rng.normal(size=(size, 5)), rng.integers(0, 5, size)
    parts = spread(shares, probabilities, binary, scores, classes)

    def body(metrics: Metrics, worker: int) -> list[float]:
        p, b, s, c = parts[worker]
        make = kinds(worker) if len(p) else np.asarray
        return [metrics.acc(make(p), make(b)), metrics.acc(make(p)[:], b.astype(bool)), metrics.acc(make(s), make(c))]

    want = [math.nan] * 3
    if size:
        one = sklearn_metrics().accuracy_score(binary, probabilities > 0.5)
        want = [one, one, sklearn_metrics().accuracy_score(classes, scores.argmax(1))]
    for got in in_job(body, len(shares)):
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("shares", SHARES[:-1], ids=str)
@pytest.mark.parametrize("digits", [1, 2, None])
def test_the_auc_is_that_of_the_pooled_data(digits: int | None, shares: tuple[int, ...]) -> None:
    """``digits`` makes ties; equal predictions share a bucket whatever it is."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, sum(shares))
    predictions = np.clip(rng.normal(0.4 + 0.2 * labels, 0.3), 0, 1)
    predictions = predictions if digits is None else predictions.round(digits)
    parts = spread(shares, predictions, labels)

    def body(metrics: Metrics, worker: int) -> list[float]:
        x, y = (kinds(worker)(part) for part in parts[worker])
        running = metrics.Auc()
        for start in range(0, len(x), 7):
            running.update(x[start : start + 7], y[start : start + 7])
        return [metrics.auc(x, y), running.compute(), running.compute()]

    want = sklearn_metrics().roc_auc_score(labels, predictions)
    for got in in_job(body, len(shares)):
        assert [type(each) for each in got] == [float] * 3
        np.testing.assert_allclose(got, [want] * 3, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_auc_of_many_predictions(dtype: str) -> None:
    rng = np.random.default_rng(6)
    labels = rng.integers(0, 2, 200_000)
    logits = torch.from_numpy(rng.normal(0.5 * labels, 1.0))
    predictions = torch.sigmoid(logits).to(getattr(torch, dtype))
    want = sklearn_metrics().roc_auc_score(labels, predictions.double().numpy())
    buckets = np.bincount((predictions.double() * BUCKETS).long().numpy(), minlength=BUCKETS + 1)
    # Two predictions of one bucket count as tied: each such pair of a negative and a positive is wrong by a half.
    bound = 0.5 * float((buckets.astype(float) ** 2).sum()) / (float(labels.sum()) * float((1 - labels).sum()))
    got = local().auc(predictions, torch.from_numpy(labels))
    assert abs(got - want) < bound < 1e-2
    assert abs(got - want) < 1e-6


@pytest.mark.parametrize(
    ("predictions", "labels", "want"),
    [
        ([0.0, 1.0], [0, 1], 1.0),
        ([0.0, 1.0], [1, 0], 0.0),
        ([0.5, 0.5, 0.5], [1, 0, 1], 0.5),
        ([1.0, 1.0 - 1 / BUCKETS], [1, 0], 1.0),
        ([[0.1], [0.2]], [[0], [1]], 1.0),
        ([True, False], [True, False], 1.0),
        (0.3, 1, math.nan),
        ([0.3, 0.4], [1, 1], math.nan),
        ([0.3, 0.4], [0, 0], math.nan),
        ([], [], math.nan),
    ],
)
def test_the_auc_at_its_edges(predictions: Any, labels: Any, want: float) -> None:
    """With labels of one kind only it is not defined: NaN, where scikit-learn warns and says the same."""
    np.testing.assert_equal(local().auc(predictions, labels), want)


def test_half_is_not_above_half() -> None:
    assert local().acc([0.5, 0.5, 0.75], [0, 1, 1]) == 2 / 3
    assert local().acc(torch.tensor([[0.9], [0.2]]), torch.tensor([[1.0], [0.0]])) == 1.0
    assert local().acc([[0.5, 0.5], [0.1, 0.9]], [0, 1]) == 1.0


def test_what_is_infinite_or_no_number_reaches_the_result() -> None:
    assert math.isinf(local().mae([math.inf], [0.0]))
    assert math.isnan(local().rmse([math.nan, 1.0], [0.0, 1.0]))
    assert math.isnan(local().mse([math.inf], [math.inf]))


# --- Of any numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda x: x, np.float32, lambda x: np.array([[x]]), lambda x: torch.tensor(x), int])
def test_one_element_gives_a_float(make: Callable[[float], Any]) -> None:
    def body(metrics: Metrics, worker: int) -> list[Any]:
        return [reduce(make(worker * 2.0)) for reduce in (metrics.sum, metrics.mean, metrics.max, metrics.min)]

    for got in in_job(body, 3):
        assert got == [6.0, 2.0, 4.0, 0.0]
        assert [type(each) for each in got] == [float] * 4


def test_workers_may_give_one_element_in_different_kinds() -> None:
    def body(metrics: Metrics, worker: int) -> Any:
        return metrics.sum([np.int32(1), 0.5, torch.tensor([2.0])][worker])

    assert in_job(body, 3) == [3.5] * 3


def test_tensors_that_are_computed_and_lists_of_them_are_numbers() -> None:
    def body(metrics: Metrics, worker: int) -> Any:
        weights = torch.nn.Parameter(torch.tensor([0.25, 0.75]))
        kinds = weights, list(weights), [weights[0], 0.75], list(weights.bfloat16()), weights.to(torch.float8_e4m3fn)
        return [metrics.mae(each, torch.tensor([0, 1])) for each in kinds]

    assert in_job(body, 2) == [[0.25] * 5] * 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "bool"])
def test_arrays_give_arrays(dtype: str) -> None:
    shape = (2, 3)
    tensors = [torch.arange(6).reshape(shape).mul(worker + 1).to(getattr(torch, dtype)) for worker in range(2)]

    def body(metrics: Metrics, worker: int) -> list[Any]:
        mine = tensors[worker]
        return [reduce(mine) for reduce in (metrics.sum, metrics.mean, metrics.max, metrics.min)]

    pooled = torch.stack(tensors).double().numpy()
    for got in in_job(body, 2, 2):
        assert all(isinstance(each, np.ndarray) and each.shape == shape for each in got)
        for each, want in zip(got, [pooled.sum(0), pooled.mean(0), pooled.max(0), pooled.min(0)], strict=True):
            np.testing.assert_array_equal(each.astype(float), want)


def test_a_list_and_nothing_at_all() -> None:
    assert local().sum([1, 2]).tolist() == [1, 2]
    assert local().max(np.zeros((0, 3))).shape == (0, 3)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m.auc([0.5, 1.5], [0, 1]), ConfigurationError, r"metrics\.auc: .*no probability; expected.*got 1.5"),
        (lambda m: m.auc([math.nan], [0]), ConfigurationError, "no probability.*got nan"),
        (lambda m: m.auc([-1e-9], [0]), ConfigurationError, "no probability.*sigmoid"),
        (lambda m: m.auc([0.5], [2]), ConfigurationError, "label is neither 0 nor 1; got 2"),
        (lambda m: m.auc([0.5], [math.nan]), ConfigurationError, "label is neither"),
        (lambda m: m.Auc().update([0.5], [-1]), ConfigurationError, r"metrics\.Auc: a label is neither"),
        (lambda m: m.auc([0.5, 0.5], [1]), ConfigurationError, r"shape \(2,\) and labels of shape \(1,\)"),
        (lambda m: m.acc([[0.5]], [1]), ConfigurationError, r"metrics\.acc: .*\(1, 1\) and labels of shape \(1,\)"),
        (lambda m: m.acc([3.0], [1]), ConfigurationError, "no probability"),
        (lambda m: m.acc([[0.1, 0.2]], [[1, 0]]), ConfigurationError, r"\(1, 2\) and labels of shape \(1, 2\)"),
        (
            lambda m: m.acc([[0.1, 0.2]], [2]),
            ConfigurationError,
            "no class; expected a whole number from 0 to 1; got 2",
        ),
        (lambda m: m.acc([[0.1, 0.2]], [-1]), ConfigurationError, "no class"),
        (lambda m: m.acc([[0.1, 0.2]], [0.5]), ConfigurationError, "no class.*got 0.5"),
        (lambda m: m.acc([[0.1, math.nan]], [1]), ConfigurationError, "a prediction is NaN"),
        (lambda m: m.mae(np.zeros((3, 1)), np.zeros(3)), ConfigurationError, r"metrics\.mae: .*\(3, 1\) and.*\(3,\)"),
        (lambda m: m.rmse([1.0], ["a"]), ArgumentTypeError, r"metrics\.rmse: these are no numbers"),
        (lambda m: m.mse([[1.0], [1.0, 2.0]], [1.0]), ArgumentTypeError, "no numbers"),
        (lambda m: m.sum(None), ArgumentTypeError, r"metrics\.sum: .*no numbers.*got NoneType"),
        (lambda m: m.mean(1j), ArgumentTypeError, "no numbers"),
        (lambda m: m.mae(torch.eye(2).to_sparse(), torch.eye(2)), ArgumentTypeError, "no numbers.*got Tensor"),
        (lambda m: m.mae(np.ma.array([1.0, 2.0], mask=[0, 1]), [1, 1]), ArgumentTypeError, "got MaskedArray"),
    ],
)
def test_what_makes_no_sense(call: Callable[[Metrics], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(local())


@pytest.mark.parametrize("metric", ["Mae", "Mse", "Rmse", "Acc", "Auc"])
def test_states_that_are_merged_are_that_of_the_pooled_data(metric: str) -> None:
    draw = np.random.default_rng(5)
    predictions, labels = draw.random(300), draw.integers(0, 2, 300)

    def body(metrics: Metrics, worker: int) -> tuple[float, float]:
        mine = slice(worker * 150, (worker + 1) * 150)
        batches = list(zip(np.split(predictions[mine], 5), np.split(labels[mine], 5), strict=True))
        early, late = getattr(metrics, metric)(), getattr(metrics, metric)()
        for batch in batches[:2]:
            early.update(*batch)
        for batch in batches[2:]:
            late.update(*batch)
        kept = early.state  # as from a file
        early.update([1.0], [1])
        from_kept = getattr(metrics, metric)().merge(kept).merge(late).compute()
        return from_kept, getattr(metrics, metric.lower())(predictions[mine], labels[mine])

    expected = {
        "Mae": sklearn_metrics().mean_absolute_error,
        "Mse": sklearn_metrics().mean_squared_error,
        "Rmse": lambda actual, predicted: math.sqrt(sklearn_metrics().mean_squared_error(actual, predicted)),
        "Acc": lambda actual, predicted: sklearn_metrics().accuracy_score(actual, predicted > 0.5),
        "Auc": sklearn_metrics().roc_auc_score,
    }
    want = expected[metric](labels, predictions)
    for merged, at_once in in_job(body, 2):
        assert merged == pytest.approx(want, abs=2e-5)
        assert merged == pytest.approx(at_once, rel=1e-12)


def test_only_states_of_the_same_metric_are_merged() -> None:
    metrics = local()
    with pytest.raises(ConfigurationError, match=r"metrics\.Mae: another metric cannot be merged"):
        metrics.Mae().merge(metrics.Mse())
    for state in (np.zeros(3), np.zeros(2, np.int64), metrics.Auc().state):
        with pytest.raises(ConfigurationError, match="no state of the metric"):
            metrics.Mae().merge(state)


def test_different_metrics_at_the_same_time() -> None:
    def body(metrics: Metrics, worker: int) -> str:
        with pytest.raises(
            PlanMismatchError, match=r"worker 0: .*int64 \(2, 65537\); worker 1: .*float64 \(2,\)"
        ) as told:
            metrics.mae([1], [1]) if worker else metrics.auc([1], [1])
        assert metrics.mae([3.0], [1.0]) == 2.0
        return str(told.value)

    first, second = in_job(body, 2)
    assert first == second


# --- Where it is ------------------------------------------------------------------------------------------------------


def test_the_modules_metrics_are_the_default_fleets() -> None:
    assert isinstance(fleet_module.metrics, Metrics)
    import fleet.metrics
    import fleet.metrics as again
    from fleet import metrics

    assert again is metrics is fleet.metrics is fleet_module.metrics
    assert isinstance(Fleet(environ={}).metrics, Metrics)
