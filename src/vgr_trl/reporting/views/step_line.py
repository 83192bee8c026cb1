"""A training step as one line on a terminal."""

from collections.abc import Mapping

_QUANTITIES = (  # heading, names under which trainers log it, format
    ("reward", ("reward",), "{:.3f}"),
    ("accuracy", ("rewards/accuracy_reward/mean",), "{:.3f}"),
    ("format", ("rewards/think_format_reward/mean",), "{:.2f}"),
    ("length", ("completions/mean_length",), "{:.0f}"),
    ("VGR", ("attention/late/vgr", "attention/all/vgr"), "{:.3f}"),
    ("live", ("sampling/live_fraction",), "{:.0%}"),
    ("loss", ("loss",), "{:.4f}"),
)


def step_line(step: int, total: int, logs: Mapping[str, float], seconds_per_step: float | None) -> str:
    """Return step, reward, accuracy, length, VGR, live groups, seconds per step and the time that is left.

    Args:
        total: steps of the run.
        logs: what the trainer logged at this step; quantities that are not in it are left out.
        seconds_per_step: mean of the last steps; None: not known yet.
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for heading, names, form in _QUANTITIES:
        value = next((logs[name] for name in names if logs.get(name) is not None), None)
        if heading == "live" and value is None and "frac_reward_zero_std" in logs:
            value = 1 - logs["frac_reward_zero_std"]
        if value is not None:
            parts.append(f"{heading} {form.format(value)}")
    if seconds_per_step is not None:
        parts += [f"{seconds_per_step:.1f} s/step", f"{duration((total - step) * seconds_per_step)} left"]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a time as people say it: 45 s, 12 min, 3 h 05."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d}"
