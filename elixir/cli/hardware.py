"""``elixir hardware``: presets, or this machine, measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from elixir.artifact import read_json
from elixir.cli import files, output
from elixir.errors import ArtifactError, InputError
from elixir.hardware.learning import learn
from elixir.hardware.profile import HardwareProfile, load_hardware, preset, preset_names
from elixir.show.records import hardware_shown, presets_table, record_of

if TYPE_CHECKING:
    from elixir.cli.output import Said


def run_hardware(args: argparse.Namespace) -> Iterator[Said]:
    """Lists presets, shows one, or measures this machine."""
    named = args.measure or args.learn or args.show is not None
    for options, given, goes_with in (
        (("quick", "disk_folder"), args.measure, "--measure"),
        (("out",), named, "--show NAME, --measure or --learn FILE"),
    ):
        for option in options:
            if getattr(args, option) and not given:
                raise InputError(f"--{option.replace('_', '-')} goes with {goes_with}")
    files.check_outputs(data=[args.out])
    if not named:
        profiles = [preset(name) for name in preset_names()]
        if args.json:
            yield {profile.name: record_of(profile) for profile in profiles}
            return
        yield presets_table(profiles)
        yield "elixir hardware --show NAME gives every number with its source; --measure fills in this machine"
        return
    profile = _measured(args) if args.measure else _learned(args.show, args.learn)
    if profile is None:
        return
    written = files.written((args.out, profile.save))
    if args.json:
        yield profile.to_dict()
        return
    yield from hardware_shown(profile)
    yield from written


def _learned(name: str | None, path: str | None) -> HardwareProfile:
    """The profile that was named, after the steps in a file, if there is one: of one report, of a list of them, or of a
    trial, which has its profile."""
    if path is None:
        return load_hardware(str(name))
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
    return learn(load_hardware(str(name)), reports)


def _measured(args: argparse.Namespace) -> HardwareProfile | None:
    """This machine. All ranks measure the same profile; None for all but the first, which alone has a bar and says
    it."""
    from elixir.microbench import measure
    from elixir.microbench.disk import check_folder
    from elixir.microbench.ranks import joined

    for folder in args.disk_folder or ():
        check_folder(folder, quick=bool(args.quick))
    with joined() as ranks, output.progress(lines=True, bar=ranks.rank == 0) as progress:
        profile = measure(progress, quick=bool(args.quick), ranks=ranks, disk_folder=args.disk_folder)
    return profile if ranks.rank == 0 else None
