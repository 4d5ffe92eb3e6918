//! Functions that the attribute accepts, and the diagnostics for others.

#[test]
fn the_attribute_accepts_and_refuses() {
    let cases = trybuild::TestCases::new();
    cases.pass("ui/pass/*.rs");
    cases.compile_fail("ui/fail/**/*.rs");
}
