import torch
from gymnasium import spaces
from rl_training_example.fourier import FourierEncoder
from rl_training_example.vpg import SPEC

from rl_training import VPG
from rl_training.testing import check_algorithm


def test_the_algorithm_keeps_the_contract():
    check_algorithm(SPEC)


def test_the_encoder_gives_sines_and_cosines():
    encoder = FourierEncoder(spaces.Box(-1.0, 1.0, (1,)), num_frequencies=2)
    x = torch.tensor([[0.5]])
    expected = torch.tensor([[0.5, 0.5, 1.0, 0.5, 1.0]])
    expected[:, 1:3] = expected[:, 1:3].sin()
    expected[:, 3:] = expected[:, 3:].cos()
    torch.testing.assert_close(encoder(x), expected)


def test_the_preset_names_the_encoder():
    agent = VPG.from_preset("CartPole-v1", num_envs=2, eval_every=0)
    assert any(isinstance(part, FourierEncoder) for part in agent.policy.modules())
    assert agent.learn(256, progress=False).env_steps == 256
    agent.close()
