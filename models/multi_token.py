"""Multi-token prediction: a published layer that predicts the token after the next one.

    x_t = fc [norm(embedding of token t + 1), norm(hidden state t)]

One decoder layer of the model's own kind, a norm and the model's head follow (DeepSeek-V3 2024,
section 2.2). The hidden state is the one that the model's head reads, after the last norm. For a
further draft the head's own state, after its norm, stands for the model's.

A head is a model of one layer, so that everything that runs, packs or shards a model takes it: its
family is "NAME.mtp". In a checkpoint its tensors begin with "mtp.", and "mtp" in "format" is its
format. It has the embedding and the head of the model beside it (`load_model(share=...)`).
"""

import copy
import dataclasses
from functools import cache

import torch
from torch import Tensor

from formats.quantizer import MTP
from model import Linear, ModelArgs, Transformer
from models.family import HEAD_SUFFIX, Family, PublishedLayout
from models.tensors import WHOLE, Recipes, copy_of


class HeadModel(Transformer):
    """What a head adds to its family's Transformer.

    Set `hidden` [B, Q, D] before each call: the states before `tokens` [B, Q].
    """

    hidden: Tensor

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        norm = type(self.norm)
        self.embedding_norm = norm(args.dim, args.norm_eps)
        self.hidden_norm = norm(args.dim, args.norm_eps)
        self.fc = Linear(2 * args.dim, args.dim)

    def embed(self, tokens: Tensor) -> Tensor:
        embedding = self.embedding_norm(super().embed(tokens))
        return self.fc(torch.cat((embedding, self.hidden_norm(self.hidden)), dim=-1))


@cache
def head_class(model_class: type[Transformer]) -> type[Transformer]:
    """Return a family's model class with what a head adds."""
    return type(f"{model_class.__name__}Head", (HeadModel, model_class), {})


def head_family(family: Family) -> Family:
    """Return the family of the heads of a family's models."""
    head = copy.copy(family)
    head.name, head.model_class = family.name + HEAD_SUFFIX, head_class(family.model_class)
    return head


def head_recipes(family: Family, args: ModelArgs, layout: PublishedLayout) -> Recipes:
    """Return the recipes of a head's tensors. family, args: of the model."""
    published = family.published_head.at(args)
    D = args.dim
    table = family.layer_recipes(family.head_args(args), 0, layout)
    recipes = {
        name: recipe._replace(
            sources={
                source.replace("model.layers.0.", published.layer): place
                for source, place in recipe.sources.items()
            }
        )
        for name, recipe in table.items()
    }
    norm = family.rest_recipes(args)["norm.weight"]
    for name in ("embedding_norm", "hidden_norm", "norm"):
        source = getattr(published, name)
        recipes[f"{name}.weight"] = norm._replace(sources={source: WHOLE})
    recipes["fc.weight"] = copy_of(published.fc, D, 2 * D)
    return {f"{MTP}.{name}": recipe for name, recipe in recipes.items()}


class HeadSource:
    """The head of a checkpoint, as a source for `load_model`. Raises ValueError if it has none."""

    def __init__(self, source, args: ModelArgs):
        """args: the head's (`models.head_args`)."""
        if MTP not in source.format:
            raise ValueError(
                "--speculate mtp: this checkpoint has no head for multi-token prediction: convert "
                "the published model again if that has one, or use --speculate lookup"
            )
        self.source, self.args = source, dataclasses.asdict(args)
        self.format: dict = source.format[MTP]
        self.plain_dtype = getattr(source, "plain_dtype", None)

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        """Return the head's tensor of that name, or its part; see `SafetensorsFile.read`."""
        return self.source.read(f"{MTP}.{name}", index, device)
