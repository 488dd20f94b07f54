"""Hooks shared by several test files."""


def at_step(step, act):
    """A hook that calls a function with the state after one given step."""

    def hook(state, number, plan, metrics):
        if number == step:
            act(state)
        return state

    return hook
