"""The credit of a run against the truth: ``calibadv audit RUN [RUN …] [key.path=value …]``.

Rewards and advantages of kept trajectories are computed again, with the run's own and with other settings.
The control permutes the rewards of a step: the level of chance. docs/audit.md defines all terms.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.advantages.estimators import judges_searches
from calibadv_jax.config import Config
from calibadv_jax.config.sections.credit import CALIBRATED
from calibadv_jax.config.trust import Trust, add_flag
from calibadv_jax.contrib.audit.evidence import EvidencePair, Variant, gather, pool
from calibadv_jax.contrib.audit.measures import measure
from calibadv_jax.contrib.audit.tables import (
    CONFIDENCE,
    as_json,
    totals_table,
    verdict,
    verdicts_table,
    windows_table,
)
from calibadv_jax.contrib.cli.replay import equal_turns, kept_config, score_again
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.seeds import random_state
from calibadv_jax.evaluation.score_tables import MIN_QUESTIONS_FOR_INTERVAL
from calibadv_jax.metrics.console import Console
from calibadv_jax.rollout_store.reader import KeptStep, find_step, read_step
from calibadv_jax.rollout_store.schema import kept_steps

# Sections of the config that an audit may change: other keys change no credit of a kept step.
SECTIONS = ("reward.", "advantage.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="RUN|key.path=value",
        help="folders of runs with log.rollouts, and settings of reward or advantage to try on them",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="key.path=V,V,…",
        help="add a column for each of these values; may be given several times",
    )
    parser.add_argument(
        "--estimators",
        metavar="NAME,NAME,…",
        help="table of whom these values of advantage.name praise and blame; calibadv+NAME: calibrated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the control's permutations (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all measures as JSON")
    add_flag(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print the tables of each run, and of several runs their mean.

    Raises:
        UserError: no run is given, a run has no audited step, or a key or value is refused.
    """
    overrides = [text for text in arguments.inputs if "=" in text]
    folders = [Path(text) for text in dict.fromkeys(arguments.inputs) if "=" not in text]
    if not folders:
        raise UserError(f"no run among {' '.join(overrides)}; give the run.dir of at least one run")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    settings = make_variants(overrides, arguments.sweep)
    estimators = make_estimators(overrides, arguments.estimators)
    console = Console()

    by_settings: dict[Path, list[Variant]] = {}
    by_estimator: dict[Path, list[Variant]] = {}
    for folder in folders:
        trust = Trust("audit", arguments.trust_run)
        audited = audit(folder, settings + estimators, arguments.seed, console, trust)
        by_settings[folder] = audited[: len(settings)]
        by_estimator[folder] = audited[len(settings) :]

    console.say(f"in brackets: the control, with the rewards of each step shuffled (seed {arguments.seed})")
    for folder, variants in by_settings.items():
        _print_totals(console, folder, variants)
        _print_windows(console, folder, variants, overrides)
        if estimators:
            console.say(f"\n{folder}: whom estimators praise and blame")
            console.say(verdicts_table(by_estimator[folder]))
    if len(by_settings) > 1:
        console.say(f"\nmean of {len(by_settings)} runs [lowest, highest] (mean of the controls)")
        console.say(totals_table(list(by_settings.values())))
    _print_verdicts(console, by_settings)
    if arguments.output is not None:
        results = []
        for folder in by_settings:
            variants = by_settings[folder] + by_estimator[folder]
            results.append({"run": str(folder), "settings": [as_json(variant) for variant in variants]})
        write_json(arguments.output, {"seed": arguments.seed, "runs": results}, indent=1)


def _print_totals(console: Console, folder: Path, variants: Sequence[Variant]) -> None:
    """Print the size of a run, and its measures under each variant of the settings."""
    total = measure(pool(variants[0]).true)
    counts = ", ".join(f"{total[name]:.0f} {name}" for name in ("groups", "trajectories", "searches"))
    console.say(f"\n{folder}: {len(variants[0].steps)} kept steps, {counts}")
    console.say(totals_table([variants]))


def _print_windows(
    console: Console, folder: Path, variants: Sequence[Variant], overrides: Sequence[str]
) -> None:
    """Print a run's measures over training: under the overrides, or else under its own settings."""
    console.say(f"\n{folder} over training, settings: {' '.join(overrides) or 'of the run'}")
    console.say(windows_table(variants[1] if overrides else variants[0]))


def _print_verdicts(console: Console, by_run: Mapping[Path, Sequence[Variant]]) -> None:
    """Print the verdict on each variant of each run, and on each variant of several runs together."""
    console.say(
        f"\nverdict ({100 * CONFIDENCE:g} % intervals over groups;"
        f" “cannot say”: intervals overlap, or there are fewer than {MIN_QUESTIONS_FOR_INTERVAL} groups)"
    )
    for folder, variants in by_run.items():
        for variant in variants:
            _print_verdict(console, str(folder), [variant])
    if len(by_run) > 1:
        for same_settings in zip(*by_run.values(), strict=True):
            _print_verdict(console, f"all {len(by_run)} runs together", same_settings)


def _print_verdict(console: Console, title: str, runs: Sequence[Variant]) -> None:
    console.say(f"{title}, settings {runs[0].name}:\n  {verdict(runs)}")


def make_variants(overrides: Sequence[str], sweeps: Sequence[str]) -> list[Variant]:
    """Return the run's own settings, these with all overrides, and on top of them each value swept.

    Args:
        overrides: "key.path=value" each.
        sweeps: "key.path=VALUE,VALUE,…" each.

    Raises:
        UserError: a sweep has no value, or a key changes no credit.
    """
    swept: list[str] = []
    for sweep in sweeps:
        key, sign, text = sweep.partition("=")
        values = text.split(",")
        if not sign or not all(values):
            raise UserError(f"--sweep {sweep}: write it as key.path=VALUE,VALUE,…")
        swept += [f"{key}={value}" for value in values]
    for override in (*overrides, *swept):
        if not override.startswith(SECTIONS):
            raise UserError(
                f"{override}: changes no credit of a kept step; give keys of reward and advantage"
            )
    variants = [Variant("run")]
    if overrides:
        variants.append(Variant(" ".join(overrides).replace("advantage.", ""), tuple(overrides)))
    for change in swept:
        variants.append(Variant(change.removeprefix("advantage."), (*overrides, change)))
    return variants


def make_estimators(overrides: Sequence[str], names: str | None) -> list[Variant]:
    """Return CalibAdv and each of the named estimators, on top of all overrides.

    Args:
        overrides: "key.path=value" each.
        names: values of advantage.name, separated by commas; calibadv+NAME is NAME, calibrated. None: the
            result is empty.
    """
    if names is None:
        return []
    variants = []
    for name in dict.fromkeys([CALIBRATED, *names.split(",")]):
        base = name.removeprefix(f"{CALIBRATED}+")
        if base != name:
            keys = [f"advantage.name={CALIBRATED}", f"advantage.base={base}"]
        else:
            keys = [f"advantage.name={name}"]
        variants.append(Variant(name, (*overrides, *keys)))
    return variants


def audit(
    folder: Path,
    variants: Sequence[Variant],
    seed: int,
    console: Console,
    trust: Trust | None = None,
) -> list[Variant]:
    """Gather the evidence of a run's kept steps under each variant of the settings.

    Args:
        folder: the run's folder.
        variants: names and overrides; the first one has no overrides. They stay unchanged.
        seed: seed of the control's permutations.
        console: shows the progress, and warns of evidence that is missing and of advantages that differ.
        trust: as for `parse_config`.

    Returns:
        The variants with their evidence.

    Raises:
        UserError: no trajectories are kept, a file is damaged, or no question names supporting passages.
    """
    paths = kept_steps(folder)
    if not paths:
        paths = {1: find_step(folder, 1)}  # raises UserError: no trajectories are kept there
    audited = [Variant(variant.name, variant.overrides) for variant in variants]
    configs: dict[tuple[str, tuple[str, ...]], Config] = {}  # by the step's config and the overrides
    num_groups = 0
    num_turns = 0
    num_equal_turns = 0
    with console.bar(str(folder), len(paths), "steps") as show:
        for num_done, (step, path) in enumerate(paths.items(), 1):
            kept = read_step(path)
            num_groups += len(kept.groups)
            for variant in audited:
                key = (kept.metadata["config"], variant.overrides)
                if key not in configs:
                    configs[key] = kept_config(kept, path, variant.overrides, trust)
                credits = credit_again(kept, configs[key])
                control = credit_again(kept, configs[key], seed)
                variant.steps[step] = EvidencePair(gather(credits), gather(control))
                if variant is audited[0]:
                    num_equal, num_compared = equal_turns(kept.credits, credits)
                    num_equal_turns += num_equal
                    num_turns += num_compared
            show(num_done)
    groups = pool(audited[0]).true.groups
    num_audited = len(groups)
    if num_audited == 0:
        raise UserError(
            f"{folder}: none of its questions names supporting passages (supporting_ids); audit a run on a"
            " generated world, or on data that names them"
        )
    if num_audited < num_groups:
        console.warn(
            f"{folder}: {num_groups - num_audited} of {num_groups} groups name no supporting passages and are"
            " left out"
        )
    if not groups["seen_hits"].any():
        console.warn(
            f"{folder}: no search ever showed a supporting passage; check that the supporting_ids of its"
            " questions are ids of the corpus that the run searched"
        )
    if num_equal_turns < num_turns:
        console.warn(
            f"{folder}: {num_turns - num_equal_turns} of {num_turns} turns get another advantage than was"
            " kept; calibadv replay shows more"
        )
    if not any(judges_searches(config.advantage) for config in configs.values()):
        names = " and ".join(sorted({config.advantage.name for config in configs.values()}))
        console.warn(
            f"{folder}: {names} judges no search; add advantage.name=calibadv to see what CalibAdv would do"
        )
    return audited


def credit_again(kept: KeptStep, config: Config, control: int | None = None) -> list[GroupCredit]:
    """Return the credit of a kept step under a config; a seed `control` permutes the rewards."""
    if control is None:
        rng = random_state(int(kept.metadata["seed"]), kept.step - 1, "reward")
    else:
        rng = random_state(control, kept.step - 1, "audit")
        config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, shuffle=True))
    _, advantages = score_again(kept, config, rng)
    return advantages.credits
