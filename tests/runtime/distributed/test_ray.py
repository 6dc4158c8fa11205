"""Workers on Ray; skipped where Ray is not installed (extra `ray`)."""

import importlib.util
import os
import signal

import pytest

from rl_training.contracts.errors import MissingExtraError
from rl_training.contracts.state import same_state
from tests.runtime.distributed.test_fleet import NORMALIZED, make, trained

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_it_names_the_extra():
    agent, _ = make("ppo", {"count": 2, "backend": "ray"})
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[ray\]'"):
        agent.learn(32, progress=False)


@needs_ray
@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_ray_gives_the_bits_of_inline_also_when_an_actor_is_killed(mode):
    import ray
    from ray._raylet import AuthenticationMode, get_authentication_mode

    killed, before = [], (dict(os.environ), signal.getsignal(signal.SIGTERM))

    def kill(run):
        if not killed:
            assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"
            assert get_authentication_mode() == AuthenticationMode.TOKEN
            killed.append(ray.kill(run.collector.backend.actors[1]))

    workers = {"count": 2, "mode": mode}
    found = trained("ppo", {**workers, "backend": "ray"}, callback=kill, **NORMALIZED)
    assert killed
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
    assert get_authentication_mode() == AuthenticationMode.DISABLED
    assert same_state(found, trained("ppo", {**workers, "backend": "inline"}, **NORMALIZED))
