//! The verbs of an admin: explain, set, remove, orphans, trash, renew.

use std::fmt::Write as _;

use kiln_wire::{Change, LeaseView, Orphan, ProjectView, Setting, SettingsPatch, SettingsView, Trashed, Why};

use super::CliError;
use super::args::KeyArg;
use super::args::{
    Field, NONE, OrphansArgs, OrphansVerb, RenewArgs, SetArgs, SettingFlags, TrashArgs, TrashVerb, WhyArgs,
};
use super::client::Client;
use super::print::{self, Printer, fields, json, out, plain};
use super::show::since;
use crate::clock::{Clock as _, SystemClock};

/// `kiln why`.
pub(super) async fn why(client: &Client, args: &WhyArgs) -> Result<(), CliError> {
    let why = client.why(&args.key).await?;
    if args.json { json(&why) } else { out(&explained(&why)) }
}

fn explained(why: &Why) -> String {
    let mut text = String::new();
    // Writing to memory does not fail.
    let _ = writeln!(text, "{}: {}", plain(&why.key), plain(&why.headline));
    let because = why.because.iter().map(|reason| ("because", reason));
    for (word, line) in because.chain(why.next.iter().map(|next| ("next", next))) {
        let _ = writeln!(text, "  {word:<7}  {}", plain(line).replace('\n', "\n           "));
    }
    if !why.events.is_empty() {
        text += "lately:\n";
        for event in &why.events {
            let _ = writeln!(text, "  {}", super::events::line_of_one(event));
        }
    }
    text
}

/// `kiln set`.
pub(super) async fn set(client: &Client, args: &SetArgs) -> Result<(), CliError> {
    let patch = patch(&args.settings, &args.reset)?;
    let view = client.set(&args.key, &patch).await?;
    if args.json {
        return json(&view);
    }
    let mut lines = vec![("key", view.key.clone())];
    lines.extend(settings(&view));
    fields(&lines)
}

/// What the flags say; each field once.
fn patch(flags: &SettingFlags, reset: &[Field]) -> Result<SettingsPatch, CliError> {
    let text = |field, value: &Option<String>| change(field, value.clone(), reset);
    let number = |field, value: Option<u32>| change(field, value, reset);
    let patch = SettingsPatch {
        tier: text(Field::Tier, &flags.tier)?,
        idle_window: text(Field::IdleWindow, &flags.idle_window)?,
        volume: text(Field::Volume, &flags.volume)?,
        volume_max: text(Field::VolumeMax, &flags.volume_max)?,
        memory: text(Field::Memory, &flags.memory)?,
        cpus: number(Field::Cpus, flags.cpus)?,
        processes: number(Field::Processes, flags.processes)?,
        io: text(Field::Io, &flags.io)?,
        entitlements: change(Field::Allow, entitlements(&flags.allow), reset)?,
        fan_out: change(Field::FanOut, flags.fan_out, reset)?,
    };
    if patch == SettingsPatch::default() {
        return Err(CliError::NothingToSet);
    }
    Ok(patch)
}

/// `None` where none was named; `none` stands for an empty set.
fn entitlements(named: &[String]) -> Option<Vec<String>> {
    (!named.is_empty()).then(|| named.iter().filter(|name| *name != NONE).cloned().collect())
}

fn change<T>(field: Field, value: Option<T>, reset: &[Field]) -> Result<Change<T>, CliError> {
    match (value, reset.contains(&field)) {
        (Some(_), true) => Err(CliError::SetAndReset(field.name())),
        (Some(value), false) => Ok(Change::To(value)),
        (None, true) => Ok(Change::Reset),
        (None, false) => Ok(Change::Keep),
    }
}

/// What counts for a project, where it comes from, and what waits for a roll.
pub(super) fn settings(project: &ProjectView) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(SettingsView {
        tier,
        idle_window,
        volume,
        volume_max,
        memory,
        cpus,
        processes,
        io,
        entitlements,
        fan_out,
    }) = &project.settings
    {
        let of = |Setting { value, origin }: &Setting| {
            format!("{} ({})", value.as_deref().unwrap_or("unlimited"), origin.name())
        };
        lines = vec![
            ("tier", of(tier)),
            ("idle window", of(idle_window)),
            ("volume", of(volume)),
            ("grows to", of(volume_max)),
            ("memory", of(memory)),
            ("cpus", of(cpus)),
            ("processes", of(processes)),
            ("io", of(io)),
            ("entitlements", of(entitlements)),
            ("fan-out", of(fan_out)),
        ];
    }
    lines.extend(project.pending.iter().map(|what| ("after a roll", what.clone())));
    lines
}

/// `kiln rm`.
pub(super) async fn remove(client: &Client, args: &KeyArg) -> Result<(), CliError> {
    client.remove(&args.key).await?;
    if args.json {
        return json(&serde_json::json!({ "key": args.key }));
    }
    out(&format!("{} is removed; its cache is in the trash: `kiln trash ls`\n", args.key))
}

/// `kiln orphans`.
pub(super) async fn orphans(client: &Client, args: &OrphansArgs) -> Result<(), CliError> {
    match &args.verb {
        None | Some(OrphansVerb::Ls) => {
            let orphans = client.orphans().await?;
            if args.json { json(&orphans) } else { orphans_table(&orphans) }
        }
        Some(OrphansVerb::Adopt { name, kind }) => {
            let taken = client.adopt(*kind, name).await?;
            if args.json { json(&taken) } else { out(&format!("{} has it now\n", plain(&taken.key))) }
        }
        Some(OrphansVerb::Rm { kind, name }) => {
            client.remove_orphan(*kind, name).await?;
            if args.json {
                json(&serde_json::json!({ "removed": name }))
            } else {
                out(&format!("{kind} {name} is removed\n"))
            }
        }
    }
}

fn orphans_table(orphans: &[Orphan]) -> Result<(), CliError> {
    let row = |orphan: &Orphan| {
        [
            orphan.kind.to_string(),
            orphan.name.clone(),
            orphan.key.clone().unwrap_or_else(|| "-".to_owned()),
            if orphan.adoptable { "yes" } else { "no" }.to_owned(),
            orphan.why.clone(),
        ]
    };
    let rows: Vec<_> = orphans.iter().map(row).collect();
    Printer::for_stdout().table(["KIND", "NAME", "KEY", "ADOPTABLE", "WHY"], &rows)
}

/// `kiln trash`.
pub(super) async fn trash(client: &Client, args: &TrashArgs) -> Result<(), CliError> {
    match &args.verb {
        None | Some(TrashVerb::Ls) => {
            let trash = client.trash().await?;
            if args.json { json(&trash) } else { trash_table(&trash) }
        }
        Some(TrashVerb::Restore { name }) => {
            let taken = client.restore(name).await?;
            if args.json { json(&taken) } else { out(&format!("{} has it back\n", plain(&taken.key))) }
        }
        Some(TrashVerb::Rm { name }) => {
            client.discard(name).await?;
            if args.json { json(&serde_json::json!({ "removed": 1 })) } else { out(&format!("{name} is gone\n")) }
        }
        Some(TrashVerb::Empty) => {
            let emptied = client.empty_trash().await?;
            if args.json { json(&emptied) } else { out(&format!("{} removed for good\n", emptied.removed)) }
        }
    }
}

fn trash_table(trash: &[Trashed]) -> Result<(), CliError> {
    let now = SystemClock.now();
    let dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let row = |one: &Trashed| {
        [one.name.clone(), dash(&one.key), super::show::age(&one.since, now), one.expires.clone(), dash(&one.repo)]
    };
    let rows: Vec<_> = trash.iter().map(row).collect();
    Printer::for_stdout().table(["NAME", "KEY", "DELETED", "KEPT UNTIL", "REPOSITORY"], &rows)
}

/// `kiln renew`.
pub(super) async fn renew(client: &Client, args: &RenewArgs) -> Result<(), CliError> {
    let token = args.build_id.parse().map_err(|_| CliError::BuildId)?;
    let lease: LeaseView = client.renew(&token).await?;
    if args.json {
        return json(&lease);
    }
    let now = SystemClock.now();
    print::fields(&[
        ("key", args.key.as_ref().map(ToString::to_string).unwrap_or_default()),
        ("lease", lease.id.get(..12).unwrap_or(&lease.id).to_owned()),
        ("since", since(&lease.created, now)),
        ("counts until", lease.alive_until),
        ("ends at", lease.expires),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_says_what_the_flags_say() {
        let (hot, most) = (Some("hot".to_owned()), Some("40GiB".to_owned()));
        let flags = SettingFlags { tier: hot, volume_max: most, cpus: Some(4), ..SettingFlags::default() };
        let said = patch(&flags, &[Field::Volume, Field::Volume, Field::FanOut]).expect("is one");
        let expected = SettingsPatch {
            tier: Change::To("hot".to_owned()),
            volume: Change::Reset,
            volume_max: Change::To("40GiB".to_owned()),
            fan_out: Change::Reset,
            cpus: Change::To(4),
            ..SettingsPatch::default()
        };
        assert_eq!(said, expected);
        assert!(matches!(patch(&flags, &[Field::Tier]), Err(CliError::SetAndReset("tier"))));
        assert!(matches!(patch(&SettingFlags::default(), &[]), Err(CliError::NothingToSet)));
    }

    #[test]
    fn an_explanation_steers_no_terminal() {
        let event = kiln_wire::EventView {
            at: "2026-11-29T00:00:00Z".to_owned(),
            kind: "step".to_owned(),
            text: "start".to_owned(),
            by: Some("uid 0".to_owned()),
            rule: Some("hot".to_owned()),
            ..kiln_wire::EventView::default()
        };
        let why = Why {
            key: "p1".to_owned(),
            headline: "It is \u{1b}[2Jwarm.".to_owned(),
            because: vec!["one\ntwo".to_owned()],
            next: Some("stop at noon".to_owned()),
            events: vec![event],
        };
        let text = explained(&why);
        assert_eq!(
            text,
            "p1: It is \u{fffd}[2Jwarm.\n  because  one\n           two\n  next     stop at noon\nlately:\n  \
             2026-11-29T00:00:00Z      step        start (by uid 0; rule: hot)\n"
        );
    }
}
