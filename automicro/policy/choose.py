"""Policies for the values that users pass as ``microbatch_size=``."""

from collections.abc import Mapping, Sequence

from automicro.policy.policy import Fixed, Policy, require_size


def make_policy(
    microbatch_size: int | str | Policy | None,
    *,
    name: str = "microbatch_size",
    unit: str = "rows",
    may_explore: bool = True,
    repeatable: bool = False,
) -> Policy:
    """Return the policy that a ``microbatch_size`` stands for, or refuse the value."""
    # Errors call the option `name`, count it in `unit`, and offer to explore if `may_explore`.
    explore = '"explore" (the fastest of those that fit), ' * (may_explore and unit == "rows")
    counted = "" if unit == "rows" else f" (of {unit}, with padding)"
    accepted = (
        f'give an int of at least 1{counted}, "auto" (found by halving), {explore}None (the whole '
        "batch), or a policy such as Halving(initial=64)"
    )
    if microbatch_size is None:
        return Fixed(None)
    policy: Policy
    if isinstance(microbatch_size, str):
        if microbatch_size == "auto":
            from automicro.policy.auto import Halving

            return Halving()
        if microbatch_size != "explore":
            raise ValueError(f"{name}={microbatch_size!r} is not a size: {accepted}")
        from automicro.policy.explore import Explore

        policy = Explore()
    # A class has all the methods of a policy, but there is no instance to call them on.
    elif isinstance(microbatch_size, type):
        raise TypeError(
            f"{name} is the class {microbatch_size.__name__}, not an instance: pass "
            f"{microbatch_size.__name__}(...)"
        )
    elif isinstance(microbatch_size, Policy):
        policy = microbatch_size
    elif hasattr(microbatch_size, "propose"):
        raise TypeError(
            f"{name} is a {type(microbatch_size).__name__}, which proposes sizes but is not a "
            "Policy. Derive its class from automicro.Policy, which has defaults for the rest"
        )
    else:
        try:
            return Fixed(require_size(microbatch_size, name=name))
        except (TypeError, ValueError) as error:
            # This lists all accepted values, which the function that checks rows does not know.
            raise type(error)(f"{name}={microbatch_size!r} is not a size: {accepted}") from None
    # Results would not repeat if the clock decided sizes.
    if policy.explores and repeatable:
        raise ValueError(
            f"{name}={microbatch_size!r} chooses sizes by measured time, so they differ from "
            "run to run, but repeatable=True was given. Leave repeatable out, or give the size "
            f"that was found, as in {name}=16"
        )
    return policy


def with_levels(
    policy: Policy,
    levels: Sequence[str],
    *,
    by_time: bool,
    choices: Mapping[str, Sequence[float | str]] | None = None,
) -> Policy:
    """Return a policy that finds the level together with the size."""
    from automicro.policy.explore import Explore, FastestLevel
    from automicro.policy.ladder import Ladder

    # A policy that explores sizes explores levels with them. Otherwise the clock chooses the level
    # that is fastest at its largest size, or levels are climbed when the smallest size fails.
    if isinstance(policy, Explore):
        return policy.with_levels(levels, choices)
    if by_time:
        return FastestLevel(policy, levels)
    return Ladder(policy, levels)
