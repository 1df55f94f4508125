//! `kiln token`: who else may come.

use kiln_wire::{TokenRequest, TokenView};

use super::CliError;
use super::args::{TokenArgs, TokenVerb};
use super::client::Client;
use super::print::{Printer, json, out, plain};
use super::show::age;
use crate::clock::{Clock as _, SystemClock};
use crate::stdio;

pub(super) async fn run(client: &Client, args: &TokenArgs) -> Result<(), CliError> {
    match &args.verb {
        TokenVerb::Create { name, grade, repositories, expires } => {
            let (grade, repositories) = (grade.name().to_owned(), repositories.clone());
            let request = TokenRequest { name: name.clone(), grade, repositories, lasts: expires.clone() };
            let made = client.create_token(&request).await?;
            if args.json {
                return json(&made);
            }
            stdio::say(
                "The token is shown this once. Give it to kiln as KILN_TOKEN, or send it as `Authorization: Bearer`.",
            );
            out(&format!("{}\n", plain(&made.token)))
        }
        TokenVerb::Ls => {
            let tokens = client.tokens().await?;
            if args.json { json(&tokens) } else { table(&tokens) }
        }
        TokenVerb::Revoke { id } => {
            client.revoke_token(id).await?;
            if args.json {
                json(&serde_json::json!({ "revoked": id.as_str() }))
            } else {
                out(&format!("token {id} is revoked\n"))
            }
        }
    }
}

fn table(tokens: &[TokenView]) -> Result<(), CliError> {
    let now = SystemClock.now();
    let row = |token: &TokenView| {
        let repositories = token.repositories.join(" ");
        let expires = token.expires.as_deref().unwrap_or("never").to_owned();
        let used = token.last_used.as_deref().map_or_else(|| "never".to_owned(), |used| age(used, now));
        [token.id.clone(), token.name.clone(), token.grade.clone(), repositories, expires, used, token.made_by.clone()]
    };
    let rows: Vec<_> = tokens.iter().map(row).collect();
    Printer::for_stdout().table(["ID", "NAME", "GRADE", "REPOSITORIES", "EXPIRES", "LAST USED", "MADE BY"], &rows)
}
