"""Models in which some layers have a sliding window and the others see all positions.

Windowed layers have the args' RoPE. Full layers have the same (gpt-oss), none (Flint, Kolibri 1),
or one of their own (layer_rope.py).
"""

from dataclasses import dataclass

from model import Block
from models.config import HFConfig, full_layers
from models.layers.scaled_rope import ScaledRopeArgs, ScaledRopeFamily

KINDS = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class WindowedArgs(ScaledRopeArgs):
    full_layers: tuple[int, ...] = ()  # layers without the sliding window

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.sliding_window


def leave_full_unrotated(block: Block, args: WindowedArgs, layer: int) -> None:
    """Set a layer's window. A full layer has no RoPE: tokens are ordered by windowed layers."""
    block.attention.window = args.window_of(layer)
    if layer in args.full_layers:
        block.attention.rotary_dim = 0


class WindowedFamily(ScaledRopeFamily):
    """A family whose layer_types says which layers have the sliding window."""

    def usual_full(self, layer: int, n_layer: int) -> bool:
        """Whether a layer has no window if layer_types is absent."""
        return True

    def window_fields(self, c: HFConfig) -> dict:
        n_layer = c.integer("num_hidden_layers")
        full = full_layers(c, KINDS, lambda layer: self.usual_full(layer, n_layer))
        windowed = len(full) < n_layer
        if windowed or c.get("sliding_window") is not None:  # one that no layer has is checked, too
            window = c.integer("sliding_window")
        return {"sliding_window": window if windowed else None, "full_layers": full}
