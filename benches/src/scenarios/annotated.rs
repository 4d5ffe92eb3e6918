//! What an annotated function adds to an unoptimised build: time, and machine code.
//!
//! A crate with 100 functions is built, and one with 300, each with the attribute and without. The difference of the
//! differences belongs to 200 annotated functions. `LOCK_BENCH_TREE` names another checkout to measure instead of this
//! one.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::Plan;
use crate::report::{Bar, Report};
use crate::resources::cpu_seconds_of_children;

const FEW: usize = 100;
const MANY: usize = 300;

/// One build.
#[derive(Clone, Copy)]
struct Built {
    seconds: f64,
    cpu_seconds: f64,
    text_bytes: f64,
}

/// What the chart shows of a build: its name, its unit, its value.
type Figure = (&'static str, &'static str, fn(&Built) -> f64);

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin("annotated", "200 annotated functions in an unoptimised build, over plain ones");
    let tree = std::env::var_os("LOCK_BENCH_TREE").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace").to_owned(),
        PathBuf::from,
    );
    let probe = Probe::new(&tree);
    // Builds the dependencies.
    probe.build(1, true);
    let figures: [Figure; 3] = [
        ("wall time", "ms", |built| built.seconds * 1e3),
        ("processor time", "ms", |built| built.cpu_seconds * 1e3),
        ("text", "bytes", |built| built.text_bytes),
    ];
    let mut runs = [const { Vec::new() }; 3];
    for _ in 0..plan.runs {
        let [few, many] = [FEW, MANY].map(|count| {
            let [plain, annotated] = [false, true].map(|annotated| probe.build(count, annotated));
            figures.map(|(_, _, of)| of(&annotated) - of(&plain))
        });
        for (runs, (few, many)) in runs.iter_mut().zip(few.into_iter().zip(many)) {
            runs.push(many - few);
        }
    }
    for ((what, unit, _), runs) in figures.into_iter().zip(runs) {
        report.figure(&format!("200 functions: {what}"), unit, &runs, Bar::None);
        let each: Vec<f64> = runs.iter().map(|run| run / (MANY - FEW) as f64).collect();
        report.figure(&format!("each function: {what}"), unit, &each, Bar::None);
    }
}

/// A program of annotated functions, outside of the workspace.
struct Probe {
    folder: tempfile::TempDir,
}

impl Probe {
    fn new(tree: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let manifest = format!(
            "workspace = {{}}\n\
             package = {{ name = \"probe\", edition = \"2024\" }}\n\
             bin = [{{ name = \"probe\", path = \"main.rs\" }}]\n\
             dependencies.lock-runtime = {{ path = {:?} }}\n\
             dependencies.tokio = {{ version = \"1\", features = [\"macros\", \"rt\", \"time\"] }}\n",
            tree.join("lock-runtime")
        );
        let write = |name: &str, text: &[u8]| {
            fs::write(folder.path().join(name), text).expect("the folder can be written");
        };
        write("Cargo.toml", manifest.as_bytes());
        // The versions of the workspace, which are downloaded.
        write("Cargo.lock", &fs::read(tree.join("Cargo.lock")).expect("a workspace is locked"));
        Self { folder }
    }

    fn build(&self, functions: usize, annotated: bool) -> Built {
        let folder = self.folder.path();
        fs::write(folder.join("main.rs"), source(functions, annotated)).expect("it can be written");
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let (began, cpu) = (Instant::now(), cpu_seconds_of_children());
        let built = Command::new(cargo)
            .args(["build", "--quiet"])
            .current_dir(folder)
            .env("CARGO_TARGET_DIR", folder.join("target"))
            .env("CARGO_INCREMENTAL", "0")
            .env_remove("CARGO_MANIFEST_DIR")
            .status();
        let (seconds, cpu_seconds) =
            (began.elapsed().as_secs_f64(), cpu_seconds_of_children() - cpu);
        assert!(built.is_ok_and(|status| status.success()), "the annotated functions build");
        let size = Command::new("size").arg(folder.join("target/debug/probe")).output();
        let size = String::from_utf8(size.expect("binutils are installed").stdout);
        let size = size.expect("size prints text");
        let text = size.lines().nth(1).and_then(|line| line.split_whitespace().next());
        let text_bytes = text.and_then(|text| text.parse().ok()).expect("size prints a number");
        Built { seconds, cpu_seconds, text_bytes }
    }
}

/// Functions as services have them: an argument with fields, a loop with an await, an error of their own.
fn source(functions: usize, annotated: bool) -> String {
    let mut source = String::from(
        "#![allow(unused_imports)]
use lock_runtime::{LockError, distributed_lock};
#[derive(Debug)]
pub struct Order { pub id: u64, pub lines: Vec<u64> }
#[derive(Debug)]
pub struct OrderError(pub String);
impl From<LockError> for OrderError {
    fn from(error: LockError) -> Self { Self(error.to_string()) }
}
type Boxed = std::pin::Pin<Box<dyn Future<Output = Result<u64, OrderError>> + Send>>;
",
    );
    let attribute = r#"#[distributed_lock(key = "order:<order.id>", ttl = "5s")]"#;
    let attribute = if annotated { attribute } else { "" };
    let mut all = String::new();
    for n in 0..functions {
        let _ = write!(
            source,
            "{attribute}
pub async fn settle_{n}(order: Order) -> Result<u64, OrderError> {{
    let mut sum = order.id;
    for line in &order.lines {{
        sum += line * {n};
        tokio::task::yield_now().await;
    }}
    if sum == 7 {{
        return Err(OrderError(format!(\"seven in {n}\")));
    }}
    Ok(sum)
}}
"
        );
        let _ =
            write!(all, "all.push(Box::pin(settle_{n}(Order {{ id: {n}, lines: vec![{n}] }})));");
    }
    source
        + "pub fn all() -> Vec<Boxed> { let mut all: Vec<Boxed> = Vec::new();"
        + &all
        + "all }
#[tokio::main(flavor = \"current_thread\")]
async fn main() {
    lock_runtime::init(\"memory://\").await.unwrap();
    for one in all() {
        println!(\"{:?}\", one.await);
    }
}
"
}
