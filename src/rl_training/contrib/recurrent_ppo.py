"""PPO with a recurrent policy, for partial observability.

The surrogate is PPO's (Schulman et al. 2017, arXiv:1707.06347). The policy is trained on sequences that begin with the
recurrent state from the time of collection (the "stored state" of Kapturowski et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.ppo import PPOConfig, minibatch_losses, ppo_epochs
from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.arrays import ArrayObservation, map_observation
from rl_training.contracts.batches import Observation, Progress, RolloutBatch, UpdateResult
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.contrib.recurrent.memory import MemoryConfig
from rl_training.contrib.recurrent.policy import RecurrentActorCriticPolicy, Sequences
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.policies.parameters import GradientStep, ParameterStore


@documented
@dataclass
class RecurrentPPOConfig(PPOConfig):
    """Settings of RecurrentPPO: those of PPO, the recurrent network, and how rollouts are split into sequences."""

    num_steps: int = setting(
        128, "Steps of each environment per rollout.", ge=1, le=1_000_000, search=choices(32, 64, 128, 256, 512)
    )
    minibatch_size: int = setting(
        128,
        "Minibatch size in transitions, at least one sequence (rollouts are split into parts of about this size).",
        ge=1,
        le=10_000_000,
        search=choices(64, 128, 256, 512),
    )
    sequence_length: int | None = setting(
        32,
        "Length of truncated backpropagation through time; none for whole rollouts.",
        ge=1,
        search=choices(8, 16, 32, 64),
    )
    memory: MemoryConfig = setting(factory=MemoryConfig, help="Memory.")

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.network.shared and self.memory.critic == "separate":
            found.append("network > shared: needs a shared memory; set memory.critic to shared")
        for name in ("actor", "critic"):
            if getattr(self.network, name) != "mlp":
                found.append(f"network > {name}: must be 'mlp'; registered networks are not supported after a memory")
        if self.network.exploration == "gsde":
            found.append("network > exploration: must be 'gaussian'; 'gsde' is not supported after a memory")
        return found


def cut_rollout(rollout: RolloutBuffer, states: Tensor, length: int) -> tuple[Tensor, Sequences]:
    """Split a rollout into sequences of `length` steps of one environment; the last of each may be padded.

    `states` [T, N, S] are the recurrent states before each row. Returns, for each position [length, B] in the
    sequences, the index of its row in the flattened rollout (which has no invalid rows), and the sequences.
    """
    valid, starts = rollout.valid[: len(states)].to(states.device), rollout.episode_starts().to(states.device)
    rows = (valid.flatten().cumsum(0) - 1).view_as(valid) * valid
    num_windows = math.ceil(len(states) / length)

    def fold(x: Tensor) -> Tensor:
        """From [T, N] to [length, B]: all environments of the first time window, then all of the next."""
        padded = torch.cat([x, x.new_zeros(num_windows * length - len(x), x.shape[1])])
        folded: Tensor = padded.reshape(num_windows, length, -1).transpose(0, 1).flatten(1)
        return folded

    there = fold(valid)
    used = there.any(0)  # a sequence may hold only a reset, and so no valid row
    sequences = Sequences(there[:, used], fold(starts)[:, used], states[::length].flatten(0, 1)[used])
    return fold(rows)[:, used], sequences


class RecurrentPPOAlgorithm(Algorithm[RecurrentPPOConfig]):
    """PPO on minibatches of whole sequences."""

    policy: RecurrentActorCriticPolicy

    def __init__(
        self, config: RecurrentPPOConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        with torch.random.fork_rng(devices=[]):  # initial weights come from `rng`, not from torch's global generator
            torch.default_generator.manual_seed(int(rng.integers(2**63)))
            self.policy = RecurrentActorCriticPolicy(spec, config.network, config.memory, config.box_actions).to(device)
        self.store = ParameterStore(self.policy, config.optimizer)
        self.step = GradientStep(self.store, self.losses, module=self.policy, max_grad_norm=config.max_grad_norm)

    def losses(self, clip_coef: Tensor, rows: RolloutBatch, sequences: Sequences) -> dict[str, Tensor]:
        """The PPO losses of one minibatch of whole sequences."""
        judged = self.policy.evaluate_actions(rows.obs, rows.actions, sequences)
        return minibatch_losses(self.config, rows, judged, clip_coef)

    def update(self, batch: RolloutBuffer, progress: Progress) -> UpdateResult:
        """Several epochs of gradient steps on a rollout."""
        states = self._states(batch)
        self._estimate_returns(batch, states)
        data = batch.flatten(self.device)
        rows, sequences = cut_rollout(batch, states[:-1], self.config.sequence_length or batch.num_steps)

        def epoch() -> Iterator[tuple[RolloutBatch, Sequences]]:
            for chosen in self._minibatches(rows.shape[1], data.num_rows):
                there = sequences.there[:, chosen]
                part = Sequences(there, sequences.starts[:, chosen], sequences.state[chosen])
                yield data.rows(rows[:, chosen][there]), part

        return ppo_epochs(self.config, self.step, data, epoch, progress)

    def _states(self, rollout: RolloutBuffer) -> Tensor:
        """The recurrent states [T + 1, N, S] before each row of a rollout and after the last.

        They are computed once per rollout, not again after each gradient step. The rollout is processed in windows of
        the sequence length, so that images need no more memory here than in a minibatch.
        """

        def seen(part: slice) -> Observation:
            return map_observation(lambda x: x[part].to(self.device), rollout.obs)

        starts, first = rollout.episode_starts().to(self.device), rollout.first_state
        state = self.policy.no_memory(rollout.num_envs) if first is None else torch.as_tensor(first).to(self.device)
        found = [state.unsqueeze(0)]
        length = self.config.sequence_length or len(starts)
        for begin in range(0, len(starts), length):
            part = slice(begin, min(begin + length, len(starts)))
            found.append(self.policy.states(seen(part), found[-1][-1], starts[part]))
        return torch.cat(found)

    def _estimate_returns(self, rollout: RolloutBuffer, states: Tensor) -> None:
        """Compute advantages and returns; bootstrapped values use the recurrent state of the interrupted episode.

        The final observation of a truncated episode is evaluated with the state after its last row. So is the
        observation after the rollout, unless it begins an episode.
        """
        assert rollout.last_obs is not None
        size, final_obs, final_values = len(states) - 1, rollout.stacked_final_obs(), None
        if final_obs is not None:
            steps, envs = torch.tensor(rollout.final_rows).T.to(self.device)
            final_values = self._values(final_obs, states[steps + 1, envs])
        begins = rollout.dones[size - 1] | ~rollout.valid[size - 1]
        rollout.compute_returns_and_advantages(
            last_value=self._values(rollout.last_obs, states[-1], begins),
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            final_values=final_values,
        )

    def _values(self, obs: ArrayObservation, states: Tensor, begins: Tensor | None = None) -> Tensor:
        tensors = map_observation(lambda x: torch.from_numpy(x).to(self.device), obs)
        return self.policy.value(tensors, states, begins).cpu()

    def _minibatches(self, num_sequences: int, num_rows: int) -> list[Tensor]:
        """Shuffle the sequences and split them into minibatches of about `minibatch_size` rows."""
        order = torch.from_numpy(self.rng.permutation(num_sequences)).to(self.device)
        count = round(num_rows / self.config.minibatch_size)
        return list(order.tensor_split(min(max(1, count), num_sequences)))


SPEC = AlgorithmSpec(
    name="recurrent_ppo",
    title="RecurrentPPO",
    config=RecurrentPPOConfig,
    algorithm=RecurrentPPOAlgorithm,
    regimes=(Regime.ON_POLICY,),
    action_spaces=(spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box),
    paper="Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347",
    default_num_envs=8,
    layer="contrib",
)
