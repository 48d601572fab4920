"""Says which steps of a worker do what: updates of gradient merge, averages of local SGD. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategy.collective import DistributedStrategy


@dataclass(frozen=True)
class Pace:
    """Counts steps from 1."""

    merged: int = 1
    local: int = 0
    local_from: int = 0

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Pace:
        merge, local = strategy.gradient_merge, strategy.local_sgd
        return cls(
            merged=1 if merge is None else merge.k_steps,
            local=0 if local is None else local.k_steps,
            local_from=0 if local is None else local.begin_step,
        )

    @property
    def sends_gradients(self) -> bool:
        return self.local == 0

    @property
    def reduces_in_backward(self) -> bool:
        return self.sends_gradients and self.merged == 1

    def updates(self, step: int) -> bool:
        """Say whether the wrapped optimizer steps in this step."""
        return step % self.merged == 0

    def averages(self, step: int) -> bool:
        """Say whether parameters are averaged after this step."""
        if self.local == 0:
            return False
        return step <= self.local_from or (step - self.local_from) % self.local == 0
