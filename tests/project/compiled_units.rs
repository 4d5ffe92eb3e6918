//! The files of what this test program was built from.

use std::path::PathBuf;

use lock_tests::cargo;
use serde_json::Value;

/// What cargo says about each unit that it has compiled.
pub(crate) struct CompiledUnits(Vec<Value>);

impl CompiledUnits {
    /// cargo prints the file of each unit, and compiles nothing that is up to date.
    pub(crate) fn of_this_program() -> Self {
        let mut cargo = cargo("test");
        let cargo = cargo.args(["--no-run", "--message-format", "json"]).output();
        let cargo = cargo.expect("cargo starts");
        assert!(cargo.status.success(), "{}", String::from_utf8_lossy(&cargo.stderr));
        let units = String::from_utf8(cargo.stdout).expect("cargo prints UTF-8");
        Self(
            units.lines().map(|unit| serde_json::from_str(unit).expect("a unit as JSON")).collect(),
        )
    }

    /// The file of the library `name`. A build for the host, of a build script or a macro, has fewer features.
    pub(crate) fn library(&self, name: &str) -> PathBuf {
        self.0
            .iter()
            .filter(|unit| unit["reason"] == "compiler-artifact" && unit["target"]["name"] == name)
            .filter(|unit| unit["profile"]["test"] == false)
            .max_by_key(|unit| unit["features"].as_array().map_or(0, Vec::len))
            .and_then(|unit| unit["filenames"].as_array())
            .and_then(|files| {
                files.iter().filter_map(Value::as_str).find(|file| !file.ends_with(".rmeta"))
            })
            .map(PathBuf::from)
            .unwrap_or_else(|| panic!("cargo prints no library {name}"))
    }
}
