"""Computes metrics over the data of all workers, such as ``fleet.metrics.auc(predictions, labels)``.

Each worker gives what it has, of any length, or nothing; all of them make the same call and get the same answer. Only
sums and counts travel, never the data. Importing this does not import numpy, since ``import fleet`` imports this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fleet.errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    #: (call, predictions, labels) -> what a batch adds
    Count = Callable[[str, Any, Any], Array]

#: (value, output, op) -> the value of all workers made one
AllReduce = Callable[[Any, Any, str], Any]

#: A power of two, so that finding a prediction's bucket rounds nothing away.
BUCKETS = 1 << 16


class Metrics:
    """Computes figures over the data of all workers. Every worker makes each call, in the same order, and all get one
    answer.

    Examples:
        >>> fleet.metrics.acc([0.9, 0.2, 0.6], [1, 0, 0])
        0.6666666666666666
    """

    def __init__(self, all_reducer: Callable[[str], AllReduce]) -> None:
        """``all_reducer`` takes the name of a call and returns the function that reduces over the workers for it."""
        self._all_reducer = all_reducer

    # Of any numbers: element by element over the workers

    def sum(self, x: Any) -> Any:
        """Return the sum over all workers, element by element: a float for one element, else a numpy array.

        Examples:
            >>> fleet.metrics.sum([1.0, 2.0])
            array([1., 2.])
        """
        return self._elementwise("sum", x)

    def max(self, x: Any) -> Any:
        """Return the largest value that any worker has, element by element: a float for one element, else a numpy
        array.

        Examples:
            >>> fleet.metrics.max(3)
            3.0
        """
        return self._elementwise("max", x)

    def min(self, x: Any) -> Any:
        """Return the smallest value that any worker has, element by element: a float for one element, else a numpy
        array.

        Examples:
            >>> fleet.metrics.min([3, 1])
            array([3, 1])
        """
        return self._elementwise("min", x)

    def mean(self, x: Any) -> Any:
        """Return the mean over the workers, which all count alike, element by element: a float for one element, else a
        numpy array.

        Examples:
            >>> fleet.metrics.mean(0.25)
            0.25
        """
        return self._elementwise("mean", x)

    # Of predictions and labels: over all elements of all workers

    def mae(self, predictions: Any, labels: Any) -> float:
        """Return the mean absolute error. NaN if no worker has any data.

        Examples:
            >>> fleet.metrics.mae([1.0, 3.0], [1.0, 2.0])
            0.5
        """
        return self._running("mae", "mae").update(predictions, labels).compute()

    def mse(self, predictions: Any, labels: Any) -> float:
        """Return the mean squared error. NaN if no worker has any data.

        Examples:
            >>> fleet.metrics.mse([1.0, 3.0], [1.0, 1.0])
            2.0
        """
        return self._running("mse", "mse").update(predictions, labels).compute()

    def rmse(self, predictions: Any, labels: Any) -> float:
        """Return the root of the mean squared error. NaN if no worker has any data.

        Examples:
            >>> fleet.metrics.rmse([3.0], [1.0])
            2.0
        """
        return self._running("rmse", "rmse").update(predictions, labels).compute()

    def acc(self, predictions: Any, labels: Any) -> float:
        """Return the share of right predictions; NaN if no worker has any data. Probabilities in the shape of the
        labels predict 1 above 0.5; values of shape (samples, classes) for labels of shape (samples,) predict the class
        with the largest value.

        Examples:
            >>> fleet.metrics.acc([[0.1, 0.9], [0.7, 0.3]], [1, 1])
            0.5
        """
        return self._running("acc", "acc").update(predictions, labels).compute()

    def auc(self, predictions: Any, labels: Any) -> float:
        """Return the area under the ROC curve of probabilities against labels of 0 and 1, computed in 65536 buckets:
        ties within a bucket count half. It is NaN unless there are labels of both kinds, since it is not defined then.

        Examples:
            >>> fleet.metrics.auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
            0.75
        """
        return self._running("auc", "auc").update(predictions, labels).compute()

    # The same, collected batch by batch; a caller may take them for classes

    def Mae(self) -> Running:  # noqa: N802
        """Return a mean absolute error that is collected batch by batch.

        Examples:
            >>> fleet.metrics.Mae().update([1.0], [1.0]).update([3.0], [2.0]).compute()
            0.5
        """
        return self._running("Mae", "mae")

    def Mse(self) -> Running:  # noqa: N802
        """Return a mean squared error that is collected batch by batch.

        Examples:
            >>> fleet.metrics.Mse().update([1.0], [1.0]).update([3.0], [1.0]).compute()
            2.0
        """
        return self._running("Mse", "mse")

    def Rmse(self) -> Running:  # noqa: N802
        """Return the root of a mean squared error that is collected batch by batch.

        Examples:
            >>> fleet.metrics.Rmse().update([3.0], [1.0]).update([1.0], [3.0]).compute()
            2.0
        """
        return self._running("Rmse", "rmse")

    def Acc(self) -> Running:  # noqa: N802
        """Return an accuracy that is collected batch by batch.

        Examples:
            >>> fleet.metrics.Acc().update([0.9], [1]).update([0.7], [0]).compute()
            0.5
        """
        return self._running("Acc", "acc")

    def Auc(self) -> Running:  # noqa: N802
        """Return an AUC that is collected batch by batch.

        Examples:
            >>> auc = fleet.metrics.Auc()
            >>> for scores, clicks in [([0.1, 0.4], [0, 0]), ([0.35, 0.8], [1, 1])]:
            ...     _ = auc.update(scores, clicks)
            >>> auc.compute()
            0.75
        """
        return self._running("Auc", "auc")

    def _running(self, name: str, metric: str) -> Running:
        call = f"metrics.{name}"
        self._all_reducer(call)  # too early is told at once
        return Running(call, metric, lambda: self._all_reducer(call))

    def _elementwise(self, op: str, x: Any) -> Any:
        call = f"metrics.{op}"
        reduce = self._all_reducer(call)
        array = _numbers(call, x)
        if array.size == 1:
            return float(reduce(float(array.reshape(-1)[0]), None, op))
        return reduce(array, None, op)


class Running:
    """Collects a metric batch by batch and computes it over the batches of all workers.

    auc = fleet.metrics.Auc()
    for x, y in batches:
        auc.update(model(x), y)
    print(auc.compute())

    It collects into one array, ``state``, and states add up: ``compute`` adds those of the workers, and ``merge`` those
    of several loops, or one that was kept from an earlier run.
    """

    def __init__(self, call: str, metric: str, all_reducer: Callable[[], AllReduce]) -> None:
        self._call = call
        self._metric = metric
        self._all_reducer = all_reducer
        self._count, self._value = _METRICS[metric]
        self._state = _EMPTY[metric]()

    def update(self, predictions: Any, labels: Any) -> Running:
        """Count a batch of this worker's; nothing travels."""
        self._state = self._state + self._count(self._call, predictions, labels)
        return self

    def merge(self, other: Running | Array) -> Running:
        """Add what another object of the same metric has collected, or the ``state`` of one."""
        import numpy as np

        if isinstance(other, Running) and other._metric != self._metric:
            raise ConfigurationError(
                f"{self._call}: another metric cannot be merged", expected=self._metric, got=other._metric
            )
        state = np.asarray(other._state if isinstance(other, Running) else other)
        if state.shape != self._state.shape or state.dtype != self._state.dtype:
            raise ConfigurationError(
                f"{self._call}: this is no state of the metric",
                expected=f"{self._state.dtype} of shape {self._state.shape}",
                got=f"{state.dtype} of shape {state.shape}",
            )
        self._state = self._state + state
        return self

    @property
    def state(self) -> Array:
        """Return a copy of what was collected on this worker."""
        return self._state.copy()

    def compute(self) -> float:
        """Return the metric of everything that every worker has collected so far. All workers call it."""
        return self._value(self._all_reducer()(self._state, None, "sum"))


def _no_buckets() -> Array:
    """Return empty buckets of negatives and positives; a prediction of exactly 1 has a bucket to itself."""
    import numpy as np

    return np.zeros((2, BUCKETS + 1), np.int64)


def _in_buckets(call: str, predictions: Any, labels: Any) -> Array:
    import numpy as np

    predicted = _probabilities(call, predictions)
    actual = _binary(call, labels)
    _check_alike(call, predicted, actual)
    buckets = (predicted * BUCKETS).astype(np.int64).reshape(-1)
    positive = actual.reshape(-1) == 1
    return np.stack(
        [np.bincount(of_kind, minlength=BUCKETS + 1) for of_kind in (buckets[~positive], buckets[positive])]
    )


def _area(counts: Array) -> float:
    negatives, positives = counts.astype(float)
    pairs = negatives.sum() * positives.sum()
    if not pairs:
        return math.nan
    below = negatives.cumsum() - negatives / 2
    return float((positives * below).sum() / pairs)


def _nothing() -> Array:
    """Return a sum of zero over no samples."""
    import numpy as np

    return np.zeros(2)


def _errors(error: Callable[[Array], Array]) -> Count:
    def count(call: str, predictions: Any, labels: Any) -> Array:
        import numpy as np

        predicted, actual = _doubles(call, predictions), _doubles(call, labels)
        _check_alike(call, predicted, actual)
        with np.errstate(all="ignore"):  # infinities and NaN reach the result
            return np.array([error(predicted - actual).sum(), predicted.size], float)

    return count


def _hits(call: str, predictions: Any, labels: Any) -> Array:
    import numpy as np

    right = _right(call, predictions, labels)
    return np.array([right.sum(), right.size], float)


def _mean(state: Array) -> float:
    total, over = state
    return float(total / over) if over else math.nan


#: What a batch adds to the state, and what the state comes to.
_METRICS: dict[str, tuple[Count, Callable[[Array], float]]] = {
    "mae": (_errors(abs), _mean),
    "mse": (_errors(lambda difference: difference * difference), _mean),
    "rmse": (_errors(lambda difference: difference * difference), lambda state: math.sqrt(_mean(state))),
    "acc": (_hits, _mean),
    "auc": (_in_buckets, _area),
}
_EMPTY: dict[str, Callable[[], Array]] = dict.fromkeys(_METRICS, _nothing) | {"auc": _no_buckets}


def _right(call: str, predictions: Any, labels: Any) -> Array:
    """Return for every sample whether its prediction is right."""
    import numpy as np

    predicted = _doubles(call, predictions)
    if predicted.ndim == 2 and predicted.shape[1] > 1:
        actual = _doubles(call, labels)
        samples, classes = predicted.shape
        if actual.shape != (samples,):
            raise _unlike(call, predicted, actual)
        if np.isnan(predicted).any():
            raise ConfigurationError(f"{call}: a prediction is NaN")
        outside = (actual != np.floor(actual)) | ~((actual >= 0) & (actual < classes))
        if outside.any():
            raise ConfigurationError(
                f"{call}: a label is no class",
                expected=f"a whole number from 0 to {classes - 1}",
                got=actual[outside][0],
            )
        return np.asarray(predicted.argmax(axis=1) == actual)
    predicted, actual = _probabilities(call, predictions), _binary(call, labels)
    _check_alike(call, predicted, actual)
    return np.asarray((predicted > 0.5) == (actual == 1))


def _probabilities(call: str, predictions: Any) -> Array:
    predicted = _doubles(call, predictions)
    inside = (predicted >= 0) & (predicted <= 1)
    if not inside.all():
        raise ConfigurationError(
            f"{call}: a prediction is no probability",
            expected="numbers from 0 to 1",
            got=predicted[~inside][0],
            todo="Put logits through a sigmoid first.",
        )
    return predicted


def _binary(call: str, labels: Any) -> Array:
    actual = _doubles(call, labels)
    known = (actual == 0) | (actual == 1)
    if not known.all():
        raise ConfigurationError(f"{call}: a label is neither 0 nor 1", got=actual[~known][0])
    return actual


def _check_alike(call: str, predicted: Array, actual: Array) -> None:
    if predicted.shape != actual.shape:
        raise _unlike(call, predicted, actual)


def _unlike(call: str, predicted: Array, actual: Array) -> ConfigurationError:
    return ConfigurationError(
        f"{call}: predictions and labels do not fit together",
        got=f"predictions of shape {predicted.shape} and labels of shape {actual.shape}",
    )


def _doubles(call: str, x: Any) -> Array:
    import numpy as np

    return _numbers(call, x).astype(np.float64)


def _numbers(call: str, x: Any) -> Array:
    """Return an array of real numbers made of an array, a tensor, a number, or a list of numbers."""
    import numpy as np

    kind = type(x).__name__
    if isinstance(x, list | tuple) and any(hasattr(each, "detach") for each in x):
        x = [_numbers(call, each) for each in x]
    try:
        if hasattr(x, "detach"):  # a tensor; its elements may be of a type that numpy does not know
            x = x.detach().cpu()
            x = (x.float() if str(x.dtype).startswith(("torch.bfloat16", "torch.float8")) else x).numpy()
        array = np.asarray(None if isinstance(x, np.ma.MaskedArray) else x)  # which would forget its mask
    except (RuntimeError, TypeError, ValueError):  # a sparse tensor; a list of lists of several lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise ArgumentTypeError(
            f"{call}: these are no numbers",
            expected="an array, a tensor, a number or a list of numbers",
            got=f"{kind} of {array.dtype}",
        )
    return array
