"""When what happens: pure functions of the update counter `u`, which counts optimizer updates from 0.

A minibatch is consumed in `i` consecutive passes, then discarded. At update u the order is GG's Algorithm 1:
sync, collect, reference log-probs under the active reference, step, u += 1, refresh, evaluate, save.

With a recorded pool (GG C.3) the behaviour policy is the one that sampled it, for good: there is no sync, and a
collection is a stretch of the pool that is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from grpo_lab.config import ConfigError, TrainConfig

REFRESHED_BY_DEFAULT = ("agro", "ggpo", "ggpo_clip")
AUTO_T_REF = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The timeline of a run.

    v: minibatches between two weight syncs. i: updates per minibatch. minibatches_per_collection: minibatches gathered
    in one collection; divides v. t_ref: updates between reference refreshes, None for a fixed reference, "epoch" for
    one after each pass over the prompts. overlap: each collection is sampled while the one before is consumed, by the
    weights that the engine has then. offline: groups come from a pool; v is then one collection, and nothing is synced.
    updates: budget in updates, or None where `epochs` is the budget.
    """

    v: int
    i: int
    minibatches_per_collection: int
    t_ref: int | Literal["epoch"] | None
    overlap: bool
    updates: int | None
    epochs: int | None
    evaluate_every: int | None
    save_every: int | None
    offline: bool = False

    @classmethod
    def from_config(cls, config: TrainConfig) -> Schedule:
        """Resolve the words of `schedule.*`.

        Raises:
            ConfigError: a value that is neither a number nor one of the words.
        """
        s = config.schedule
        per_collection = s.v if s.minibatches_per_collection == "v" else s.minibatches_per_collection
        if not isinstance(per_collection, int) or isinstance(per_collection, bool) or per_collection < 1:
            raise ConfigError(
                f"schedule.minibatches_per_collection={s.minibatches_per_collection} must be `v` or a whole number "
                "from 1"
            )
        t_ref = s.t_ref
        if t_ref == "auto":
            t_ref = AUTO_T_REF if config.objective.name in REFRESHED_BY_DEFAULT else None
        if t_ref is not None and t_ref != "epoch" and (not isinstance(t_ref, int) or isinstance(t_ref, bool)):
            raise ConfigError(f"schedule.t_ref={s.t_ref} must be a number of updates, null, `epoch` or `auto`")
        offline = config.source == "pool"
        if offline:
            per_collection = whole_blocks(getattr(config.objective, "tis_block", None) or 1, s.i)
        return cls(
            v=per_collection if offline else s.v,
            i=s.i,
            minibatches_per_collection=per_collection,
            t_ref=t_ref,
            overlap=s.overlap,
            updates=s.updates if s.epochs is None else None,
            epochs=s.epochs,
            evaluate_every=config.evaluation.every,
            save_every=config.checkpoint.every,
            offline=offline,
        )

    @property
    def title(self) -> str:
        """How stale the data are, for names of runs."""
        return f"pool_i{self.i}" if self.offline else f"v{self.v}_i{self.i}"

    def minibatch(self, u: int) -> int:
        """The index of the minibatch that update u consumes."""
        return u // self.i

    def pass_index(self, u: int) -> int:
        """Which of the `i` passes over its minibatch update u is, from 0."""
        return u % self.i

    def is_last_pass(self, u: int) -> bool:
        return self.pass_index(u) == self.i - 1

    def sync(self, u: int) -> bool:
        """Whether the rollout engine gets the learner's weights before update u."""
        return not self.offline and u % (self.v * self.i) == 0

    def collect(self, u: int) -> bool:
        """Whether a collection is gathered before update u."""
        return u % (self.minibatches_per_collection * self.i) == 0

    def collects_ahead(self, u: int) -> bool:
        """Whether sampling the next collection begins before update u: with overlap, where one is still wanted."""
        return self.overlap and self.collect(u) and not self.finished(u + self.minibatches_per_collection * self.i)

    @property
    def samples_after_syncs_alone(self) -> bool:
        """Whether the engine never samples from weights that the learner has moved on from."""
        return self.minibatches_per_collection == self.v and not self.overlap

    @property
    def oldest_age(self) -> int:
        """Updates between the weights that sampled a response and its last use, at most."""
        return (self.v + (self.minibatches_per_collection if self.overlap else 0)) * self.i - 1

    def last_sync(self, u: int) -> int:
        """The update before which the engine's present weights were handed over."""
        return 0 if self.offline else u - u % (self.v * self.i)

    def position_in_collection(self, u: int) -> int:
        """The place of update u's minibatch in its collection, from 0."""
        return self.minibatch(u) % self.minibatches_per_collection

    def samples_again_before_sync(self, u: int) -> bool:
        """Whether, with u updates done, the engine's weights must sample once more before they are replaced."""
        span = self.minibatches_per_collection * self.i
        next_collection = -(-u // span) * span
        next_sync = -(-u // (self.v * self.i)) * (self.v * self.i)
        return next_collection < next_sync

    def displaces_engine(self, u: int) -> bool:
        """Whether an evaluation, or a save (which may be resumed from), falls between the sync before update u and the
        last sampling of its period: the engine's weights are then needed once more."""
        return any(
            (self.evaluate(each) or self.save(each)) and self.samples_again_before_sync(each)
            for each in range(u + 1, u + self.v * self.i)
        )

    def refresh(self, u_after: int, *, epoch_completed: bool = False) -> bool:
        """Whether the reference becomes the learner once `u_after` updates are done.

        `epoch_completed`: the collection just consumed holds the end of a pass over the prompts.
        """
        if self.t_ref == "epoch":
            return epoch_completed and u_after % (self.minibatches_per_collection * self.i) == 0
        return self.t_ref is not None and u_after % self.t_ref == 0

    def evaluate(self, u_after: int) -> bool:
        """Whether held-out problems are scored once `u_after` updates are done; 0 and the end included."""
        return self.evaluate_every is not None and (u_after % self.evaluate_every == 0 or self.finished(u_after))

    def save(self, u_after: int) -> bool:
        return (
            self.save_every is not None and u_after > 0 and (u_after % self.save_every == 0 or self.finished(u_after))
        )

    def finished(self, u: int) -> bool:
        return self.updates is not None and u >= self.updates

    def block_end(self, u: int, size: int) -> int:
        """The update before which the block of `size` updates that holds u ends (GG Eq. 61).

        Blocks start at multiples of `size` and are cut at a sync. They are also cut at a collection's end: what has
        not been sampled cannot be scored beforehand.
        """
        ends = ((u // span + 1) * span for span in (size, self.v * self.i, self.minibatches_per_collection * self.i))
        return min(ends)

    def block_start(self, u: int, size: int) -> bool:
        return u == 0 or self.block_end(u - 1, size) == u


def whole_blocks(size: int, i: int) -> int:
    """The fewest minibatches of `i` updates that end where a block of `size` updates ends: what is read of a pool at a
    time, so that no block is cut."""
    return math.lcm(size, i) // i


def prompts_at_a_time(config: TrainConfig) -> int:
    """Prompts that a collection draws at a time."""
    schedule = Schedule.from_config(config)
    return config.collection.prompts_per_batch or schedule.minibatches_per_collection * config.groups_per_minibatch


def speedup_bound(step: float, sync: float, v: int) -> float:
    """step / (step - sync (1 - 1/v)): how many times as fast fewer syncs can make a run, at most. At v = 1 an update
    takes `step` seconds, `sync` of them for the sync; a sync every v updates saves sync (1 - 1/v) of them."""
    return step / (step - sync * (1 - 1 / v))


def shares_weights(config: TrainConfig) -> bool:
    """Whether the embedded sampler needs no weights of its own: it is in the learner's process, and done before the
    learner moves on."""
    embedded = config.rollout.engine == "hf" and config.learner.engine == "torch_local"
    return embedded and Schedule.from_config(config).samples_after_syncs_alone
