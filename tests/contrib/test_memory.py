"""The memory: torch's formulas written out, resets inside sequences, and one call equal to many steps."""

import pytest
import torch

from rl_training.contrib.recurrent.memory import Memory, MemoryConfig

KINDS = ["lstm", "gru"]
T, B, F, H = 7, 3, 2, 4


def make_memory(kind, orthogonal=True):
    torch.manual_seed(0)
    return Memory(F, MemoryConfig(kind=kind, size=H), orthogonal)


def make_sequences(memory, seed=0):
    """Inputs, states, and starts: at the very first step, in the middle, two in a row, in the last step."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(T, B, F, generator=generator)
    state = torch.randn(B, memory.state_size, generator=generator)
    starts = torch.zeros(T, B, dtype=torch.bool)
    starts[0, 1] = starts[2, 0] = starts[3, 0] = starts[4, 1] = starts[T - 1, 0] = True
    return inputs, state, starts


def by_hand(memory, x, state):
    """One step of one row, as in the papers (in torch's arrangement of the gates)."""
    weights = dict(memory.network.named_parameters())
    from_input = weights["weight_ih_l0"] @ x + weights["bias_ih_l0"]
    hidden = state[:H]
    from_hidden = weights["weight_hh_l0"] @ hidden + weights["bias_hh_l0"]
    if memory.is_lstm:
        i, f, g, o = (from_input + from_hidden).chunk(4)
        cell = f.sigmoid() * state[H:] + i.sigmoid() * g.tanh()
        return torch.cat([o.sigmoid() * cell.tanh(), cell])
    (xr, xz, xn), (hr, hz, hn) = from_input.chunk(3), from_hidden.chunk(3)
    reset, update = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    return (1 - update) * (xn + reset * hn).tanh() + update * hidden


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_formulas(kind):
    memory = make_memory(kind, orthogonal=False)
    inputs, state, starts = make_sequences(memory)
    states = memory.states(inputs, state, starts)
    assert states.shape == (T, B, memory.state_size) == (T, B, 2 * H if kind == "lstm" else H)
    for b in range(B):
        now = state[b]
        for t in range(T):
            now = by_hand(memory, inputs[t, b], torch.zeros_like(now) if starts[t, b] else now)
            torch.testing.assert_close(states[t, b], now)


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_is_as_many_steps(kind):
    memory = make_memory(kind)
    for seed in range(3):
        inputs, state, starts = make_sequences(memory, seed)
        starts |= torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < 0.1 * seed
        outputs = memory(inputs, state, starts)
        assert outputs.shape == (T, B, H)
        torch.testing.assert_close(outputs, memory.output(memory.states(inputs, state, starts)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("everywhere", [False, True])
def test_no_start_and_nothing_but_starts(kind, everywhere):
    memory = make_memory(kind)
    inputs, state, starts = make_sequences(memory)
    starts = torch.full_like(starts, everywhere)
    torch.testing.assert_close(memory(inputs, state, starts), memory.output(memory.states(inputs, state, starts)))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_and_end_at_an_episode_start(kind):
    memory = make_memory(kind)
    inputs, state, starts = make_sequences(memory)
    found = []
    for compute in (memory.forward, lambda *given: memory.output(memory.states(*given))):
        leaves = [inputs.clone().requires_grad_(), state.clone().requires_grad_()]
        loss = compute(*leaves, starts)[-1].square().sum()
        found.append(torch.autograd.grad(loss, [*leaves, *memory.parameters()]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    of_inputs, of_state = found[0][:2]
    last_start = [max([t for t in range(T) if starts[t, b]], default=None) for b in range(B)]
    assert last_start == [T - 1, 4, None]
    assert (of_inputs[: T - 1, 0] == 0).all()
    assert (of_inputs[:4, 1] == 0).all()
    assert (of_inputs[4:, 1] != 0).all()
    assert (of_inputs[:, 2] != 0).all()
    assert [bool((row != 0).any()) for row in of_state] == [False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_later_or_in_another_sequence_does_not_matter(kind):
    memory = make_memory(kind)
    inputs, state, starts = make_sequences(memory)
    outputs = memory(inputs, state, starts)
    inputs[5:, 0] = 100.0
    inputs[:, 1] = -100.0
    changed = memory(inputs, state, starts)
    torch.testing.assert_close(outputs[:5, 0], changed[:5, 0])
    torch.testing.assert_close(outputs[:, 2], changed[:, 2])
    assert not torch.allclose(outputs[5, 0], changed[5, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights(kind):
    memory = make_memory(kind)
    for name, parameter in memory.network.named_parameters():
        if name.startswith("bias"):
            assert (parameter == 0).all()
        else:
            torch.testing.assert_close(parameter.T @ parameter, torch.eye(parameter.shape[1]))
    plain = make_memory(kind, orthogonal=False)
    assert (dict(plain.network.named_parameters())["bias_ih_l0"] != 0).any()
