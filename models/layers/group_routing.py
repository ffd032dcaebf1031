"""Routers by softmax or sigmoid scores, with groups of experts or a bias (DeepSeek, GLM, ERNIE)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from models.layers.shared_expert import SharedExpertMoE
from ops.declared import ExpertAdditions, Routing
from ops.plain.topk import top_k


class GroupRoutedMoE(SharedExpertMoE):
    """Softmax routing within the best groups of experts (DeepSeek-V2 2024, section 2.2.2).

    args.n_group groups, a token's experts are in the best args.n_active_group; args.routed_scale
    multiplies the routing weights. Without these fields there is one group, and no scale.
    """

    group_experts = 1  # a group's score is the sum of its best scores

    def __init__(self, args):
        super().__init__(args)
        self.n_group = getattr(args, "n_group", 1)
        self.n_active_group = getattr(args, "n_active_group", 1)
        self.routed_scale = getattr(args, "routed_scale", 1.0)

    def selection_scores(self, scores: Tensor) -> Tensor:
        """fp32 [T, E] -> same, with -inf outside of the best groups."""
        if self.n_active_group == self.n_group:
            return scores
        members = scores.unflatten(-1, (self.n_group, -1))  # [T, groups, E / groups]
        best, _ = top_k(members, self.group_experts)
        _, groups = top_k(sum(best).squeeze(-1), self.n_active_group)
        ids = torch.arange(self.n_group, device=scores.device)
        active = (groups.unsqueeze(-1) == ids).any(1)
        return torch.where(active.unsqueeze(-1), members, float("-inf")).flatten(1)

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        expert_indices, expert_weights = super().route(scores)
        if self.routed_scale != 1:
            expert_weights = expert_weights * self.routed_scale
        return expert_indices, expert_weights

    def fused_decode_settings(self) -> ExpertAdditions | None:
        """Return the additions; None with groups, which no kernel computes."""
        if self.n_active_group != self.n_group:
            return None
        routing = Routing(self.n_active, self.norm_topk, self.routed_scale)
        return ExpertAdditions(shared=self.shared, routing=routing)


class SigmoidRoutedMoE(GroupRoutedMoE):
    """Sigmoid scores; a learned bias corrects the choice alone (DeepSeek-V3 2024, 2.1.2)."""

    group_experts = 2

    def __init__(self, args):
        super().__init__(args)
        # fp32: the bias balances experts by its last digits.
        self.score_bias = nn.Parameter(torch.empty(args.n_expert), requires_grad=False)

    def selection_scores(self, scores: Tensor) -> Tensor:
        return super().selection_scores(scores.sigmoid() + self.score_bias)

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores.float()
        _, expert_indices = top_k(self.selection_scores(scores), self.n_active)
        parts = scores.sigmoid().gather(-1, expert_indices)
        total = parts.sum(dim=-1, keepdim=True) if self.norm_topk else 1.0
        return expert_indices, parts * (self.routed_scale / total)

    def fused_decode_settings(self) -> ExpertAdditions | None:
        added = super().fused_decode_settings()
        if added is None or added.routing is None:
            return None
        return replace(added, routing=replace(added.routing, score_bias=self.score_bias))


class BiasedSoftmaxMoE(SharedExpertMoE):
    """Softmax scores; a learned bias corrects the choice alone (ERNIE 4.5)."""

    def __init__(self, args):
        super().__init__(args)
        self.score_bias = nn.Parameter(torch.empty(args.n_expert), requires_grad=False)

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        parts = scores.float().softmax(dim=-1)
        _, expert_indices = top_k(parts + self.score_bias, self.n_active)
        parts = parts.gather(-1, expert_indices)
        return expert_indices, parts / parts.sum(dim=-1, keepdim=True) if self.norm_topk else parts

    def fused_decode_settings(self) -> ExpertAdditions | None:
        added = super().fused_decode_settings()
        routing = Routing(self.n_active, self.norm_topk, score_bias=self.score_bias, softmax=True)
        return replace(added, routing=routing) if added else None
