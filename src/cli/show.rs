//! The verbs that ask kilnd and print its answer.

use std::ffi::OsStr;
use std::process::ExitCode;

use kiln_domain::{BuildSpec, Key, Role, Timestamp};
use kiln_wire::ProjectView;
use serde::Serialize;

use super::admin::settings;
use super::args::{KeyArg, KeyArgs, NamingArgs, RouteArgs, StopArgs};
use super::buildx::{create_arguments, quoted};
use super::client::Client;
use super::polling::Asking;
use super::print::{self, Printer, human_size};
use super::private::{self, CredentialFiles};
use super::signals::Signals;
use super::{CliError, build, forge, identity, waiting};
use crate::clock::{Clock as _, SystemClock};

/// `kiln route`.
pub(super) async fn route(client: &Client, args: &RouteArgs) -> Result<ExitCode, CliError> {
    let whose = forge::identity(spec_of(&args.project)?, &args.asking.lane)?;
    // Made first: a credential that cannot be kept must not be asked for.
    if let Some(directory) = &args.credential {
        private::make_directory(directory)?;
    }
    let request = build::request_of(&whose, &args.asking, args.credential.is_some());
    let mut asking = Asking::new(client, request, whose.key);
    let key = asking.key();
    let mut signals = Signals::listen()?;
    let asked = tokio::select! {
        asked = waiting::with_spinner(client, key, asking.until_ready(args.asking.wait)) => asked,
        ending = signals.next() => {
            asking.give_up().await;
            return Ok(ExitCode::from(ending.exit_code()));
        }
    };
    let mut routed = match asked {
        Ok(routed) => routed,
        Err(error) => {
            asking.give_up().await;
            return Err(error.into());
        }
    };
    let mut create = String::new();
    if let (Some(directory), Some(credential)) = (&args.credential, routed.credential.take()) {
        let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.clone());
        let files = CredentialFiles::write(&directory, &credential)?;
        let name = format!("kiln-{}", routed.key);
        let words = create_arguments(&name, &routed.endpoint, &routed.server_name, &files);
        create = format!("docker buildx {}", quoted(&words));
    }
    if args.project.json {
        print::json(&routed)?;
        return Ok(ExitCode::SUCCESS);
    }
    print::fields(&[
        ("key", routed.key.to_string()),
        ("endpoint", routed.endpoint),
        ("server name", routed.server_name),
        ("build id", routed.build_id.unwrap_or_default()),
        ("generation", routed.generation.to_string()),
        ("ready", if routed.ready { "yes" } else { "no" }.to_owned()),
        ("builder", create),
    ])?;
    Ok(ExitCode::SUCCESS)
}

/// `kiln key`, offline.
pub(super) fn key(args: &NamingArgs) -> Result<(), CliError> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct View<'a> {
        key: &'a Key,
        #[serde(flatten)]
        spec: &'a BuildSpec,
        #[serde(skip_serializing_if = "Option::is_none")]
        pull_request: Option<&'a str>,
    }
    let whose = forge::identity(spec_of(&args.project)?, &args.lane)?;
    if args.project.json {
        return print::json(&View { key: &whose.key, spec: &whose.spec, pull_request: whose.pull_request.as_deref() });
    }
    print::out(&format!("{}\n", whose.key))
}

fn spec_of(args: &KeyArgs) -> Result<BuildSpec, CliError> {
    identity::resolve(&args.identity, OsStr::new(&args.target), args.context.as_deref())
}

/// `kiln ps`.
pub(super) async fn projects(client: &Client, printer: Printer, json: bool) -> Result<(), CliError> {
    let projects = client.projects().await?;
    if json {
        return print::json(&projects);
    }
    let now = SystemClock.now();
    let rows: Vec<_> = in_families(&projects).into_iter().map(|project| row(project, now)).collect();
    printer.table(["KEY", "PHASE", "BUILDS", "CONNECTIONS", "LAST ACTIVITY", "ARCH", "TARGET", "REPOSITORY"], &rows)
}

fn row(project: &ProjectView, now: Timestamp) -> [String; 8] {
    let component = if project.name.is_empty() { String::new() } else { format!(" ({})", project.name) };
    let of = kin(project).map(|kin| format!(", {kin}")).unwrap_or_default();
    let indent = if project.project.is_some() { "  " } else { "" };
    [
        format!("{indent}{}", project.key),
        phase(project),
        project.leases.len().to_string(),
        project.connections.to_string(),
        age(&project.last_activity, now),
        project.arch.clone(),
        project.target.clone(),
        format!("{}{component}{of}", project.repo),
    ]
}

/// Each project, and below it what is derived from it.
pub(super) fn in_families(projects: &[ProjectView]) -> Vec<&ProjectView> {
    let family = |one: &'_ ProjectView| one.project.clone().unwrap_or_else(|| one.key.clone());
    let mut sorted: Vec<&ProjectView> = projects.iter().collect();
    sorted.sort_by_cached_key(|one| (family(one), one.key.len(), one.key.clone()));
    sorted
}

/// What it is to its project, where it is not the project itself.
pub(super) fn kin(project: &ProjectView) -> Option<String> {
    kin_of(&project.key, &project.role, project.pull_request.as_deref())
}

pub(super) fn kin_of(key: &str, role: &str, pull_request: Option<&str>) -> Option<String> {
    match (role, pull_request) {
        ("" | "project", _) => None,
        ("pull-request", Some(name)) => Some(format!("pull request {name}")),
        ("pull-request", None) => Some("pull request".to_owned()),
        ("fork", _) => Some("untrusted".to_owned()),
        ("member", _) => Some(match key.parse::<Key>().map(|key| key.role()) {
            Ok(Role::Member(number)) => format!("member {number}"),
            _ => "member".to_owned(),
        }),
        (other, _) => Some(other.to_owned()),
    }
}

/// With a question mark where kilnd has not looked yet.
fn phase(project: &ProjectView) -> String {
    let doubt = if project.unconfirmed { "?" } else { "" };
    format!("{}{doubt}", project.phase)
}

/// `kiln show`.
pub(super) async fn project(client: &Client, args: &KeyArg) -> Result<(), CliError> {
    let project = client.project(&args.key).await?;
    if args.json {
        return print::json(&project);
    }
    let now = SystemClock.now();
    let mut fields = vec![
        ("key", project.key.clone()),
        ("repository", project.repo.clone()),
        (
            "is",
            kin(&project)
                .map(|kin| format!("{kin} of {}", project.project.as_deref().unwrap_or("?")))
                .unwrap_or_default(),
        ),
        ("name", project.name.clone()),
        ("target", project.target.clone()),
        ("arch", project.arch.clone()),
        ("phase", phase(&project)),
        ("reason", project.reason.clone()),
        (
            "queue",
            project.queue.map(|place| format!("place {} of {}", place.position, place.length)).unwrap_or_default(),
        ),
        ("generation", project.generation.to_string()),
        ("address", project.address.clone()),
        ("server name", project.server_name.clone()),
        ("connections", project.connections.to_string()),
        ("created", since(&project.created, now)),
        ("last activity", since(&project.last_activity, now)),
        ("cache may hold", project.cache_size.map(human_size).unwrap_or_default()),
        ("last snapshot", project.last_snapshot.as_deref().map(|taken| since(taken, now)).unwrap_or_default()),
    ];
    fields.extend(settings(&project));
    for lease in &project.leases {
        let id = lease.id.get(..12).unwrap_or(&lease.id);
        let until = if lease.expires.is_empty() { String::new() } else { format!(", ends at {}", lease.expires) };
        fields.push(("build", format!("{id} since {}{until}", since(&lease.created, now))));
    }
    print::fields(&fields)
}

/// `kiln stop`.
pub(super) async fn stop(client: &Client, args: &StopArgs) -> Result<(), CliError> {
    client.stop(&args.key, args.force).await?;
    if args.json {
        return print::json(&client.project(&args.key).await?);
    }
    let words = if args.force {
        "was stopped by force; its cache stays, and whatever still needs it (a build, the hot tier) brings it up again"
    } else {
        "is stopped; its cache stays"
    };
    print::out(&format!("{} {words}\n", args.key))
}

/// An RFC 3339 instant, and how long ago that was.
pub(super) fn since(instant: &str, now: Timestamp) -> String {
    format!("{instant} ({})", age(instant, now))
}

/// How long ago an RFC 3339 instant was; the text itself where it is none.
pub(super) fn age(instant: &str, now: Timestamp) -> String {
    let Ok(then) = instant.parse::<jiff::Timestamp>() else { return instant.to_owned() };
    let seconds = now.since(Timestamp::from_millis(then.as_millisecond())).as_secs();
    match seconds {
        0..=119 => format!("{seconds} s ago"),
        120..=7199 => format!("{} min ago", seconds / 60),
        7200..=172_799 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages() {
        let now = Timestamp::from_millis(1_800_000_000_000);
        let ago = |seconds: i64| {
            let then = jiff::Timestamp::from_second(1_800_000_000 - seconds).expect("an instant");
            age(&then.to_string(), now)
        };
        assert_eq!(
            [ago(-5), ago(3), ago(600), ago(7200), ago(200_000)],
            ["0 s ago", "3 s ago", "10 min ago", "2 h ago", "2 days ago"]
        );
        assert_eq!(age("soon", now), "soon");
    }

    #[test]
    fn a_phase_that_nobody_has_looked_at_is_a_question() {
        let view = |unconfirmed| ProjectView { phase: "warm".to_owned(), unconfirmed, ..ProjectView::default() };
        assert_eq!([phase(&view(false)), phase(&view(true))], ["warm", "warm?"]);
    }

    #[test]
    fn what_is_derived_stands_below_its_project() {
        let view = |key: &str, role: &str, pull_request: Option<&str>| ProjectView {
            key: key.to_owned(),
            role: role.to_owned(),
            project: (role != "project").then(|| key[key.len() - 17..].to_owned()),
            pull_request: pull_request.map(str::to_owned),
            repo: "h/r".to_owned(),
            ..ProjectView::default()
        };
        let (one, two) = ("p1111111111111111", "p2222222222222222");
        let fork = format!("f0123456789abcdef{one}");
        // As the list has them: by key.
        let listed = [
            view(&format!("c10{one}"), "member", None),
            view(&format!("c2{one}"), "member", None),
            view(&fork, "pull-request", Some("12")),
            view(&format!("fork{two}"), "fork", None),
            view(one, "project", None),
            view(two, "project", None),
            // Of a kilnd that says nothing of roles.
            ProjectView { role: String::new(), ..view("p3333333333333333", "project", None) },
        ];
        let now = Timestamp::from_millis(0);
        let shown: Vec<_> = in_families(&listed).into_iter().map(|project| row(project, now)).collect();
        let shown: Vec<_> = shown.iter().map(|row| format!("{}|{}", row[0], row[7])).collect();
        assert_eq!(
            shown,
            [
                format!("{one}|h/r"),
                format!("  c2{one}|h/r, member 2"),
                format!("  c10{one}|h/r, member 10"),
                format!("  {fork}|h/r, pull request 12"),
                format!("{two}|h/r"),
                format!("  fork{two}|h/r, untrusted"),
                "p3333333333333333|h/r".to_owned(),
            ]
        );
        assert_eq!(kin_of("x", "clone-of-tomorrow", None).as_deref(), Some("clone-of-tomorrow"));
    }
}
