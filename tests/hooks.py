"""Hooks that several files of tests use."""


def at_step(step, act):
    """A hook that does something with the state after one step."""

    def hook(state, number, plan, metrics):
        if number == step:
            act(state)
        return state

    return hook
