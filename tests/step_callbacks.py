"""Callbacks that act, or fail, after one given step."""


def at_step(step, act):
    """A callback that calls a function with the state after one given step."""

    def callback(info):
        if info.step == step:
            act(info.state)

    return callback


def failing_at(step, act=lambda: None, error=KeyError):
    def fail(state):
        act()
        raise error("of the callback")

    return at_step(step, fail)
