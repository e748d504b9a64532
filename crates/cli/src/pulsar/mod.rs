//! `gradwire pulsar`: what an operator does once at a Pulsar cluster, so that jobs can use it without admin rights.

mod admin;
mod plan;
mod setup;
mod token;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use gradwire_control::{JobName, Token};

use admin::Admin;
pub(crate) use admin::{clock_difference, parse_url};
pub(crate) use plan::DOCTOR;
use plan::{Namespace, Plan};
use setup::Row;
pub(crate) use token::expiry_in_words;

/// Prepare an Apache Pulsar cluster for jobs.
#[derive(Debug, clap::Args)]
pub(crate) struct PulsarArgs {
    #[command(subcommand)]
    command: PulsarCommand,
}

#[derive(Debug, clap::Subcommand)]
enum PulsarCommand {
    Setup(SetupArgs),
}

/// Create what a job needs at a Pulsar cluster: tenant, namespace, policies, topics, and rights of roles.
///
/// What is there already and as wanted is left alone, so it can be run again at any time. Topics are never deleted.
/// The policies of the namespace hold for all jobs in it.
///
/// Creating a tenant takes a super user's token; for all else that of an administrator of the tenant will do. Ranks
/// need neither: give their role's token to GRADWIRE_BROKER_TOKEN, and let them produce and consume by --role.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Example:
  gradwire pulsar setup --admin https://pulsar.example:8443 --token-file admin.token \\
      --tenant ml --job resnet --role trainer
and for the ranks:
  export GRADWIRE_BROKER=pulsar+ssl://pulsar.example:6651 GRADWIRE_BROKER_TOKEN_FILE=trainer.token GRADWIRE_TENANT=ml")]
pub(crate) struct SetupArgs {
    /// The cluster's admin interface: the web service of a broker or proxy, http or https; often at port 8080.
    #[arg(long, value_name = "URL", value_parser = parse_url)]
    admin: String,
    /// A file with the token to show there.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// A PEM file with the authorities to trust for https, instead of those that everyone trusts.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// The tenant of the job's topics.
    #[arg(long, env = "GRADWIRE_TENANT", default_value = "public", value_parser = plan::parse_entity)]
    tenant: String,
    /// The namespace of the job's topics, in the tenant: `JOB.VERSION` for jobs with a model version.
    #[arg(long, default_value = "default", value_parser = plan::parse_entity)]
    namespace: String,
    /// The job's name, as in `gradwire launch --job`.
    #[arg(long, value_name = "NAME", value_parser = parse_job)]
    job: JobName,
    /// A role (the subject of a token) that may produce and consume on the job's topics; may be repeated.
    #[arg(long = "role", value_name = "ROLE")]
    roles: Vec<String>,
    /// For how many days the namespace's topics keep what nobody needs to have read any more.
    #[arg(long, value_name = "DAYS", default_value_t = 14, value_parser = clap::value_parser!(u32).range(1..=3650))]
    retention_days: u32,
    /// How much of it each topic keeps at most, in MB.
    #[arg(long, value_name = "MB", default_value_t = 10_240, value_parser = clap::value_parser!(u32).range(1..))]
    retention_mb: u32,
    /// After how many seconds requests for retransmission, and contributions that nobody aggregated, are dropped.
    #[arg(long, value_name = "S", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..))]
    ttl_s: u32,
    /// Only show what would be done.
    #[arg(long)]
    dry_run: bool,
}

/// Runs the command.
pub(crate) fn run(args: &PulsarArgs) -> ExitCode {
    let PulsarCommand::Setup(args) = &args.command;
    match set_up(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("gradwire: {text}");
            ExitCode::FAILURE
        }
    }
}

fn set_up(args: &SetupArgs) -> Result<(), String> {
    let token =
        args.token_file.clone().map(|path| Token::File(path).read()).transpose().map_err(|fault| fault.detail)?;
    let admin = Admin::new(&args.admin, token, args.ca.as_deref())?;
    let plan = Plan::new(
        Namespace { tenant: args.tenant.clone(), namespace: args.namespace.clone() },
        &args.job,
        &args.roles,
        &plan::Limits { retention_days: args.retention_days, retention_mb: args.retention_mb, ttl_s: args.ttl_s },
    );
    let mut rows = Vec::new();
    let outcome = setup::execute(&admin, &plan, args.dry_run, &mut rows);
    // What was done before something failed was done.
    print(&rows).map_err(|error| format!("cannot print: {error}"))?;
    outcome.map_err(|error| error.to_string())
}

fn parse_job(text: &str) -> Result<JobName, String> {
    JobName::new(text).map_err(|fault| fault.detail)
}

fn print(rows: &[Row]) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(["what", "wanted", "result"]);
    for row in rows {
        table.add_row([row.what.as_str(), row.wanted.as_str(), row.result.to_string().as_str()]);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{table}\n{}", setup::summary(rows))?;
    out.flush()
}
