"""Everything of a run that lies between two updates, besides the learner, the prompt stream and the tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_lab.checkpoint import groups_from_state, groups_to_state, scores_from_state, scores_to_state
from grpo_lab.collect import Collection, Exhausted
from grpo_lab.diagnostics import EssSums
from grpo_lab.learner import Scores
from grpo_lab.types import Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class RunState:
    """Counters, and what is half consumed.

    update              optimizer updates done
    groups              the current collection, in order
    totals              counts over all collections so far, by metric name
    epoch_completed     whether the prompt cursor completed a pass while it was gathered
    behaviour_weights   the engine's weights, kept while they still have to sample (and an evaluation may displace them)
    first_scores        the learner's scores at the current minibatch's first pass (pi_k)
    reference_scores    the reference's scores of the current minibatch, for its further passes
    old_scores          scores at the start of the open TIS block, by minibatch index
    block_ess           weights of the open logged block, of responses and (block_token_ess) of tokens, and how many
                        minibatches it holds
    finished            whether a budget in epochs is used up
    """

    update: int = 0
    groups: tuple[Group, ...] = ()
    totals: dict[str, float] = field(default_factory=dict)
    epoch_completed: bool = False
    behaviour_weights: dict[str, Tensor] | None = None
    first_scores: Scores | None = None
    reference_scores: Scores | None = None
    old_scores: dict[int, Scores] = field(default_factory=dict)
    block_ess: EssSums = field(default_factory=EssSums)
    block_token_ess: EssSums = field(default_factory=EssSums)
    block_minibatches: int = 0
    finished: bool = False

    def to_state(self, *, collection_open: bool, samples_again: bool) -> dict[str, Any]:
        """As plain containers and tensors. An open collection is kept whole, so that positions in it stay what they
        are; one that is used up is left out, and so are behaviour weights that have sampled all they had to."""
        return {
            "update": self.update,
            "groups": groups_to_state(self.groups) if collection_open else [],
            "totals": self.totals,
            "epoch_completed": self.epoch_completed,
            "behaviour_weights": self.behaviour_weights if samples_again else None,
            "first_scores": _one_to_state(self.first_scores),
            "reference_scores": _one_to_state(self.reference_scores),
            "old_scores": scores_to_state(self.old_scores),
            "block_ess": astuple(self.block_ess),
            "block_token_ess": astuple(self.block_token_ess),
            "block_minibatches": self.block_minibatches,
            "finished": self.finished,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunState:
        return cls(
            update=state["update"],
            groups=groups_from_state(state["groups"]),
            totals=state["totals"],
            epoch_completed=state["epoch_completed"],
            behaviour_weights=state["behaviour_weights"],
            first_scores=_one_from_state(state["first_scores"]),
            reference_scores=_one_from_state(state["reference_scores"]),
            old_scores=scores_from_state(state["old_scores"]),
            block_ess=EssSums(*state["block_ess"]),
            block_token_ess=EssSums(*state["block_token_ess"]),
            block_minibatches=state["block_minibatches"],
            finished=state["finished"],
        )


def _one_to_state(scores: Scores | None) -> dict[int, Any] | None:
    return None if scores is None else scores_to_state({0: scores})


def _one_from_state(state: Mapping[int, Any] | None) -> Scores | None:
    return None if state is None else scores_from_state(state)[0]


def gathered_to_state(gathered: Collection | Exhausted | None) -> dict[str, Any] | None:
    """A collection that waits to be consumed, as plain containers and tensors."""
    if gathered is None:
        return None
    if isinstance(gathered, Exhausted):
        return {"drawn": gathered.drawn, "kept": gathered.kept}
    return {
        "groups": groups_to_state(gathered.groups),
        "accounting": gathered.accounting,
        "totals": gathered.totals,
        "epoch_completed": gathered.epoch_completed,
    }


def gathered_from_state(state: Mapping[str, Any]) -> Collection | Exhausted:
    if "drawn" in state:
        return Exhausted(state["drawn"], state["kept"])
    return Collection(
        groups=groups_from_state(state["groups"]),
        accounting=state["accounting"],
        totals=state["totals"],
        epoch_completed=state["epoch_completed"],
    )
