"""``elixir hardware``: presets, or this machine, measured."""

from __future__ import annotations

import argparse
from typing import Any

from elixir.artifact import read_json
from elixir.cli import files, output
from elixir.errors import ArtifactError, InputError
from elixir.hardware.learning import learn
from elixir.hardware.profile import IF_DOUBTFUL, HardwareProfile, doubtful_rates, preset, preset_names
from elixir.show import tables
from elixir.units import format_bytes

_SHOWN_DOUBTFUL = 3


def run_hardware(args: argparse.Namespace) -> int:
    """Lists presets, shows one, or measures this machine."""
    _check_together(args)
    files.check_outputs(data=[args.out])
    if not args.measure and args.show is None and args.learn is None:
        return _list_hardware(as_json=args.json)
    if args.measure:
        from elixir.microbench.ranks import joined

        if args.disk_folder:
            from elixir.microbench.disk import check_folder

            for folder in args.disk_folder:
                check_folder(folder, quick=args.quick)
        with joined() as ranks:
            profile = _measure(args, ranks)
        if ranks.rank != 0:
            return 0  # all ranks have the same profile; one writes it
    else:
        profile = _learned(args.show, args.learn) if args.learn else files.find_hardware(args.show)
    written = [profile.save(args.out)] if args.out else []
    if args.json:
        output.say_json(profile.to_dict())
        return 0
    say_hardware(profile)
    output.say_written(written)
    return 0


def _check_together(args: argparse.Namespace) -> None:
    """Refuses flags that say nothing without another."""
    for option in ("quick", "disk_folder"):
        if getattr(args, option) and not args.measure:
            raise InputError(f"--{option.replace('_', '-')} goes with --measure")
    if args.out and not (args.measure or args.learn or args.show is not None):
        raise InputError("--out goes with --show NAME, --measure or --learn FILE")


def say_hardware(profile: HardwareProfile) -> None:
    """Every number, its source, and whether it is to be doubted."""

    record = tables.hardware_record(profile)
    output.say_tables(tables.record_table(f"{profile.name}: {profile.device_name}", record))
    if profile.sources:
        rows = [[name, source] for name, source in profile.sources.items()]
        output.say_tables(tables.list_table("sources", ("number", "source"), rows))
    doubtful = doubtful_rates(profile)
    if doubtful:
        shown = [f"{name} ({why})" for name, why in list(doubtful.items())[:_SHOWN_DOUBTFUL]]
        more = f" and {len(doubtful) - len(shown)} more" if len(doubtful) > len(shown) else ""
        output.say(f"doubtful: {len(doubtful)} of the rates: {', '.join(shown)}{more}\n{IF_DOUBTFUL}")


def _learned(name: str | None, path: str) -> HardwareProfile:
    """The profile after the steps in a file: one report, a list of them, or a trial, which has its profile."""

    found = read_json(path)
    trial = found if isinstance(found, dict) and {"hardware", "steps"} <= found.keys() else None
    if name is None and trial is None:
        raise InputError(
            "--learn goes with --show NAME, the profile that the run was planned with, unless FILE is of `elixir try`"
        )
    reports = trial["steps"] if trial else found if isinstance(found, list) else [found]
    if not (isinstance(reports, list) and all(isinstance(report, dict) for report in reports)):
        raise ArtifactError(f"{path}: expected the numbers of a step's report, or a list of such, found neither")
    if trial and name is None:
        return learn(HardwareProfile.from_dict(trial["hardware"], source=path), reports)
    return learn(files.find_hardware(str(name)), reports)


def _measure(args: argparse.Namespace, ranks: Any) -> HardwareProfile:
    """This machine; only rank 0 has a bar."""
    from elixir.microbench import measure

    with output.progress(lines=True, bar=ranks.rank == 0) as progress:
        return measure(progress, quick=args.quick, ranks=ranks, disk_folder=args.disk_folder)


def _list_hardware(*, as_json: bool) -> int:

    profiles = [preset(name) for name in preset_names()]
    if as_json:
        output.say_json({profile.name: tables.hardware_record(profile) for profile in profiles})
        return 0
    columns = ("name", "device", "memory", "bandwidth", "bf16 peak", "host link")
    rows = [
        [
            profile.name,
            profile.device_name,
            format_bytes(profile.device_memory_bytes),
            tables.show_value("_bytes_per_s", profile.device_memory_bytes_per_s),
            tables.show_value("_flops_per_s", profile.flops_per_s.get("bfloat16")),
            tables.show_value("_bytes_per_s", profile.host_to_device_bytes_per_s),
        ]
        for profile in profiles
    ]
    output.say_tables(tables.list_table("hardware presets", columns, rows))
    output.say("elixir hardware --show NAME gives every number with its source; --measure fills in this machine")
    return 0
