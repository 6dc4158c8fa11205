"""Losses of the algorithms that constrain Q-values or policies to recorded data, against plain computations."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from rl_training.algorithms.bcq import BCQAlgorithm, BCQConfig, DiscreteBCQAlgorithm
from rl_training.algorithms.bear import BEARAlgorithm, BEARConfig
from rl_training.algorithms.cal_ql import CalQLAlgorithm, CalQLConfig
from rl_training.algorithms.cql import CQLAlgorithm, CQLConfig, DiscreteCQLAlgorithm
from rl_training.algorithms.discrete_sac import DiscreteSACAlgorithm, DiscreteSACConfig
from rl_training.algorithms.edac import EDACAlgorithm, EDACConfig
from rl_training.algorithms.rebrac import ReBRACAlgorithm, ReBRACConfig
from rl_training.algorithms.td3_bc import TD3BCAlgorithm, TD3BCConfig
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import OffPolicyNetworkConfig, StochasticNetworkConfig
from rl_training.policies.behaviour import BehaviourNetworkConfig

B, OBS, A, N = 6, 3, 2, 4
BOX = EnvSpec(spaces.Box(-1, 1, (OBS,)), spaces.Box(-1, 1, (A,)))
DISCRETE = EnvSpec(spaces.Box(-1, 1, (OBS,)), spaces.Discrete(3))
CPU = torch.device("cpu")
SIZES = {"actor_sizes": (8,), "critic_sizes": (8,)}
NETWORKS = {
    BCQConfig: BehaviourNetworkConfig(**SIZES, behaviour_sizes=(8,)),
    BEARConfig: BehaviourNetworkConfig(**SIZES, behaviour_sizes=(8,)),
    CQLConfig: StochasticNetworkConfig(**SIZES),
    CalQLConfig: StochasticNetworkConfig(**SIZES),
    EDACConfig: StochasticNetworkConfig(**SIZES),
}


def make(algorithm, config, spec=BOX, **settings):
    network = NETWORKS.get(config, OffPolicyNetworkConfig(**SIZES))
    return algorithm(config(network=network, **settings), spec, CPU, np.random.default_rng(0))


def make_batch(spec=BOX, **extras):
    torch.manual_seed(1)
    is_box = spec is BOX
    return TransitionBatch(
        obs=torch.randn(B, OBS),
        action=torch.rand(B, A) * 2 - 1 if is_box else torch.arange(B) % 3,
        reward=torch.randn(B),
        discount=torch.tensor([0.9, 0.0, 0.9, 0.9, 0.0, 0.9]),
        next_obs=torch.randn(B, OBS),
        weight=torch.rand(B) + 0.5,
        indices=torch.arange(B),
        extras=extras,
    )


def half_squares(algorithm, batch, target):
    q = algorithm.policy.critic(batch.obs, batch.action)
    return sum((batch.weight * (row - target).square()).mean() / 2 for row in q)


def close(found, expected):
    torch.testing.assert_close(found.detach(), torch.as_tensor(expected).detach(), rtol=1e-4, atol=1e-5)


def test_td3_bc_weighs_q_values_by_their_scale():
    algorithm, batch = make(TD3BCAlgorithm, TD3BCConfig, q_weight=2.0), make_batch()
    action = algorithm.policy.actor(batch.obs)
    q = algorithm.policy.critic(batch.obs, action)[0]
    expected = -2.0 * q.mean() / q.abs().mean() + F.mse_loss(action, batch.action)
    close(algorithm.actor_losses(batch)["loss"], expected)


def test_rebrac_penalises_both():
    next_action = torch.rand(B, A)
    algorithm = make(ReBRACAlgorithm, ReBRACConfig, actor_penalty=0.3, critic_penalty=0.7)
    batch = make_batch(next_action=next_action)
    with torch.no_grad():
        chosen = algorithm.actor_target.module(batch.next_obs)
        q = algorithm.critic_target.module(batch.next_obs, chosen).min(0).values
        target = batch.reward + batch.discount * (q - 0.7 * ((chosen - next_action) ** 2).sum(1))
    close(algorithm.q_target(batch, noise=None), target)
    action = algorithm.policy.actor(batch.obs)
    q = algorithm.policy.critic(batch.obs, action).min(0).values
    expected = 0.3 * ((action - batch.action) ** 2).sum(1).mean() - q.mean() / q.abs().mean()
    close(algorithm.actor_losses(batch)["loss"], expected)


def draws_of(algorithm, batch):
    draws = algorithm.target_draws(batch)
    return draws.pop("noise"), draws


def cql_penalty(algorithm, batch, draws, bound=None):
    """The penalty by loops over critics, rows and actions."""
    policy, total = algorithm.policy, 0.0
    with torch.no_grad():
        for critic in range(2):
            for row in range(B):
                terms = []
                obs, next_obs = batch.obs[row : row + 1], batch.next_obs[row : row + 1]
                for action in draws["uniform"][row]:
                    terms.append(policy.critic(obs, action[None])[critic, 0] - math.log(0.25))
                for at, noise in ((obs, "current_noise"), (next_obs, "next_noise")):
                    for one in draws[noise][row]:
                        action, log_prob = policy.actor.sample(at, one[None])
                        q = policy.critic(obs, action)[critic, 0]
                        terms.append((q if bound is None else q.maximum(bound[row])) - log_prob[0])
                total += torch.stack(terms).logsumexp(0) - policy.critic(obs, batch.action[row : row + 1])[critic, 0]
    return total / B


def test_cql_against_loops():
    algorithm = make(CQLAlgorithm, CQLConfig, num_penalty_actions=N, penalty_weight=3.0)
    batch = make_batch()
    noise, draws = draws_of(algorithm, batch)
    with torch.no_grad():
        action, _ = algorithm.policy.actor.sample(batch.next_obs, noise)
        q = algorithm.critic_target.module(batch.next_obs, action).min(0).values
        target = batch.reward + batch.discount * q  # no entropy
    expected = half_squares(algorithm, batch, target) + 0.5 * 3.0 * cql_penalty(algorithm, batch, draws)
    found = algorithm.critic_losses(batch, noise=noise, alpha=torch.tensor(0.5), **draws)
    close(found["loss"], expected)


def test_cal_ql_bounds_the_policys_values():
    algorithm = make(CalQLAlgorithm, CalQLConfig, num_penalty_actions=N)
    bound = torch.tensor([5.0, -5.0, 0.1, 0.0, -math.inf, 2.0])
    batch = make_batch(return_to_go=bound)
    _, draws = draws_of(algorithm, batch)
    found = algorithm.penalty(batch, algorithm.policy.critic(batch.obs, batch.action), **draws)
    close(found.sum(), cql_penalty(algorithm, batch, draws, bound))


def test_the_multiplier_of_cql_rises_above_the_limit_and_falls_below():
    for limit, sign in ((-100.0, 1.0), (1000.0, -1.0)):
        algorithm = make(CQLAlgorithm, CQLConfig, num_penalty_actions=N, penalty_limit=limit)
        before = algorithm.multiplier().item()
        for _ in range(3):
            algorithm.update(make_batch(), Progress())
        assert sign * (algorithm.multiplier().item() - before) > 0


def test_discrete_cql_has_the_exact_soft_maximum():
    algorithm = make(DiscreteCQLAlgorithm, CQLConfig, DISCRETE, penalty_weight=2.0)
    batch = make_batch(DISCRETE)
    critic, target = algorithm.policy.critic, algorithm.critic_target.module
    with torch.no_grad():
        chosen = critic.q_values(batch.next_obs).min(0).values.argmax(1)
        goal = batch.reward + batch.discount * target(batch.next_obs, chosen).min(0).values
    expected = 0.0
    for e in range(2):
        q = critic.q_values(batch.obs)[e]
        data = q[torch.arange(B), batch.action]
        expected += (batch.weight * F.smooth_l1_loss(data, goal, reduction="none")).mean()
        expected += 2.0 * (q.exp().sum(1).log() - data).mean()
    close(algorithm.critic_losses(batch)["loss"], expected)


def test_edac_adds_the_similarity_of_gradients():
    algorithm = make(EDACAlgorithm, EDACConfig, num_critics=4, diversity_weight=3.0)
    plain = make(EDACAlgorithm, EDACConfig, num_critics=4, diversity_weight=0.0)
    batch, noise, alpha = make_batch(), torch.randn(B, A), torch.tensor(0.2)
    step, gradients = 1e-3, torch.zeros(4, B, A)
    with torch.no_grad():
        for a in range(A):
            move = torch.zeros(A)
            move[a] = step
            ahead = algorithm.policy.critic(batch.obs, batch.action + move)
            behind = algorithm.policy.critic(batch.obs, batch.action - move)
            gradients[..., a] = (ahead - behind) / (2 * step)
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    similarity = sum(torch.cosine_similarity(gradients[i], gradients[j], dim=1).mean() for i, j in pairs) / 3
    base = plain.critic_losses(batch, noise=noise, alpha=alpha)["loss"]
    found = algorithm.critic_losses(batch, noise=noise, alpha=alpha)
    assert found["loss"].item() == pytest.approx((base + 1.5 * similarity).item(), rel=1e-2)


def test_bcq_takes_the_best_of_imitated_actions():
    algorithm = make(BCQAlgorithm, BCQConfig, perturbation=0.1, min_weight=0.75)
    policy, batch = algorithm.policy, make_batch()
    latents = torch.randn(B, N, policy.noise_size)
    target, critic = algorithm.actor_target.module, algorithm.critic_target.module
    best = []
    with torch.no_grad():
        for row in range(B):
            obs, values = batch.next_obs[row : row + 1], []
            for latent in latents[row]:
                action = policy.behaviour.decode(obs, latent.clamp(-0.5, 0.5)[None, None]).tanh()
                moved = (action + 0.1 * target(obs, action)).clamp(-1, 1)[:, 0]
                q = critic(obs, moved)[:, 0]
                values.append(0.75 * q.min() + 0.25 * q.max())
            best.append(max(values))
    close(algorithm.q_target(batch, latents=latents), batch.reward + batch.discount * torch.stack(best))
    chosen = policy.best(batch.obs, latents)
    q = torch.stack([policy.critic(batch.obs, c)[0] for c in policy.candidates(batch.obs, latents).unbind(1)])
    close(policy.critic(batch.obs, chosen)[0], q.amax(0))


def test_bcq_imitates_and_its_actor_moves_towards_larger_values():
    algorithm, batch = make(BCQAlgorithm, BCQConfig), make_batch()
    before = algorithm.behaviour_losses(batch, torch.zeros(B, algorithm.policy.noise_size))["loss"].item()
    for _ in range(150):
        algorithm.update(batch, Progress())
    after = algorithm.behaviour_losses(batch, torch.zeros(B, algorithm.policy.noise_size))["loss"].item()
    assert after < 0.5 * before


def test_discrete_bcq_excludes_improbable_actions():
    algorithm = make(DiscreteBCQAlgorithm, BCQConfig, DISCRETE, threshold=0.3)
    policy, obs = algorithm.policy, torch.randn(200, OBS)
    with torch.no_grad():
        policy.behaviour.trunk.head.bias.copy_(torch.tensor([2.0, 0.0, 1.9]))
        probs = policy.behaviour(obs).softmax(1)
        allowed = probs / probs.max(1, keepdim=True).values >= 0.3
        q = policy.critic.q_values(obs).min(0).values
        expected = torch.where(allowed, q, -1e9).argmax(1)
        assert not allowed.all()
        assert policy.mode(obs).tolist() == expected.tolist()
        assert policy.act(obs, deterministic=True).action.tolist() == expected.tolist()


def test_bear_matches_the_behaviour_before_it_maximises_values():
    algorithm, batch = make(BEARAlgorithm, BEARConfig), make_batch()
    noise, latents = torch.randn(B, N, A), torch.randn(B, N, algorithm.policy.behaviour.num_latents)
    cold = algorithm.actor_losses(batch, is_warm=False, noise=noise, latents=latents, weight=torch.tensor(2.0))
    warm = algorithm.actor_losses(batch, is_warm=True, noise=noise, latents=latents, weight=torch.tensor(2.0))
    action = algorithm.policy.unsquashed(batch.obs, noise)[:, 0].tanh()
    close(cold["loss"], 2.0 * cold["discrepancy"])
    close(warm["loss"], cold["loss"] - algorithm.policy.critic(batch.obs, action).min(0).values.mean())


def test_bears_constraint_weight_follows_the_discrepancy():
    for limit, sign in ((1e-6, 1.0), (1e6, -1.0)):
        algorithm = make(BEARAlgorithm, BEARConfig, max_discrepancy=limit)
        for _ in range(3):
            algorithm.update(make_batch(), Progress())
        assert sign * (algorithm.constraint().item() - 1.0) > 0


def test_deterministic_actions_of_candidates_depend_on_the_observation_only():
    for algorithm in (make(BCQAlgorithm, BCQConfig), make(BEARAlgorithm, BEARConfig)):
        obs = torch.randn(5, OBS)
        one = algorithm.policy.act(obs, deterministic=True).action
        assert torch.equal(one, algorithm.policy.act(obs, deterministic=True).action)
        torch.testing.assert_close(one[2:3], algorithm.policy.act(obs[2:3], deterministic=True).action)
        rng = np.random.default_rng(0)
        assert not torch.equal(algorithm.policy.act(obs, rng=rng).action, algorithm.policy.act(obs, rng=rng).action)


def test_discrete_sac_has_expectations_in_closed_form():
    algorithm, batch = make(DiscreteSACAlgorithm, DiscreteSACConfig, DISCRETE), make_batch(DISCRETE)
    alpha = torch.tensor(0.3)
    with torch.no_grad():
        probs = algorithm.policy.actor(batch.next_obs).softmax(1)
        q = algorithm.critic_target.module.q_values(batch.next_obs).min(0).values
        value = sum(probs[:, a] * (q[:, a] - 0.3 * probs[:, a].log()) for a in range(3))
    close(algorithm.q_target(batch, alpha=alpha), batch.reward + batch.discount * value)
    probs = algorithm.policy.actor(batch.obs).softmax(1)
    q = algorithm.policy.critic.q_values(batch.obs).min(0).values
    expected = sum(probs[:, a] * (0.3 * probs[:, a].log() - q[:, a]) for a in range(3)).mean()
    close(algorithm.actor_losses(batch, alpha=alpha)["loss"], expected)


def test_the_temperature_of_discrete_sac_rises_when_the_entropy_is_below_its_target():
    for share, sign in ((1.0, 1.0), (0.0, -1.0)):
        algorithm = make(DiscreteSACAlgorithm, DiscreteSACConfig, DISCRETE, target_entropy_share=share)
        with torch.no_grad():
            algorithm.policy.actor.trunk.head.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
        for _ in range(3):
            algorithm.update(make_batch(DISCRETE), Progress())
        assert sign * algorithm.temperature.log_alpha.item() > 0


def test_the_largest_entropy_counts_valid_actions():
    masked = EnvSpec(
        spaces.Dict({"observation": spaces.Box(-1, 1, (OBS,)), "action_mask": spaces.Box(0, 1, (3,), np.int8)}),
        spaces.Discrete(3),
        action_masks=True,
    )
    algorithm = make(DiscreteSACAlgorithm, DiscreteSACConfig, masked)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]])
    found = algorithm.largest_entropy({"observation": torch.zeros(3, OBS), "action_mask": mask})
    assert found.tolist() == pytest.approx([math.log(3), math.log(2), 0.0])
