"""Recurrent networks whose state is one tensor, and which reset it at the start of every episode.

Dimensions: T time, B sequences, F inputs, H outputs (the hidden size), S state size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rl_training.contracts.settings import choices, documented, setting


@documented
@dataclass
class MemoryConfig:
    """The recurrent part of a policy, between encoder and hidden layers."""

    kind: Literal["lstm", "gru"] = setting("lstm", "Kind of recurrent network.", search=choices("lstm", "gru"))
    size: int = setting(64, "Size of the hidden state.", ge=1, le=16_384, search=choices(32, 64, 128, 256))
    critic: Literal["separate", "shared"] = setting(
        "separate", "Whether the critic has its own encoder and recurrent network or shares the actor's."
    )


class Memory(nn.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997) or a GRU (Cho et al. 2014) with state resets inside sequences.

    The state [B, S] before a step is multiplied by 1 - start, so an episode begins with zeros. For a GRU it is the
    hidden state, for an LSTM the concatenated hidden and cell states.

    Example:
        >>> memory = Memory(num_inputs=2, config=MemoryConfig(kind="gru", size=3))
        >>> state = memory.step(torch.ones(1, 2), torch.zeros(1, 3), torch.tensor([True]))
        >>> state.shape
        torch.Size([1, 3])
    """

    def __init__(self, num_inputs: int, config: MemoryConfig, orthogonal: bool = True) -> None:
        super().__init__()
        self.size = config.size
        self.is_lstm = config.kind == "lstm"
        self.state_size = config.size * (2 if self.is_lstm else 1)
        self.network: nn.LSTM | nn.GRU = (nn.LSTM if self.is_lstm else nn.GRU)(num_inputs, config.size)
        if orthogonal:
            for name, parameter in self.network.named_parameters():
                nn.init.orthogonal_(parameter) if name.startswith("weight") else nn.init.zeros_(parameter)

    def step(self, inputs: Tensor, state: Tensor, start: Tensor) -> Tensor:
        """The state [B, S] after one step with inputs [B, F]; `start` [B] marks the first steps of episodes."""
        _, after = self.network(inputs.unsqueeze(0), self._split(state * ~start.unsqueeze(-1)))
        return torch.cat(after, dim=-1).squeeze(0) if self.is_lstm else after.squeeze(0)

    def output(self, state: Tensor) -> Tensor:
        """The output [..., H] of a state [..., S]: its hidden part."""
        return state[..., : self.size]

    def states(self, inputs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """The states [T, B, S] after every step with inputs [T, B, F], step by step."""
        found = []
        for row, start in zip(inputs, starts, strict=True):
            state = self.step(row, state, start)
            found.append(state)
        return torch.stack(found)

    def forward(self, inputs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """Outputs [T, B, H] of sequences [T, B, F] with initial states [B, S]; `starts` [T, B] marks episode starts.

        Equals `output` of `states`, but with a single call of torch's network, which is several times faster: sequences
        are split at episode starts, and the pieces are stacked as a batch of separate sequences.
        """
        num_steps, num_sequences = starts.shape
        cuts = starts.clone()
        cuts[0] = True
        cuts = cuts.T.reshape(-1)  # sequence-major
        piece = cuts.cumsum(0) - 1
        first = cuts.nonzero().squeeze(-1)
        place = torch.arange(len(cuts), device=cuts.device) - first[piece]
        origin, time = first // num_steps, first % num_steps
        carried = (time == 0) & ~starts[0, origin]

        beside = inputs.new_zeros(int(place.max()) + 1, len(first), inputs.shape[-1])
        beside[place, piece] = inputs.transpose(0, 1).flatten(0, 1)
        outputs, _ = self.network(beside, self._split(state[origin] * carried.unsqueeze(-1)))
        found: Tensor = outputs[place, piece].unflatten(0, (num_sequences, num_steps)).transpose(0, 1)
        return found

    def _split(self, state: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """A state [B, S] in the form that `nn.LSTM` or `nn.GRU` takes."""
        if not self.is_lstm:
            return state.unsqueeze(0)
        hidden, cell = state.unsqueeze(0).split(self.size, dim=-1)
        return hidden.contiguous(), cell.contiguous()
