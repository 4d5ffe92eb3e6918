//! What the attribute accepts, and what it says about what it does not.

#[test]
fn the_attribute_accepts_and_refuses() {
    let cases = trybuild::TestCases::new();
    cases.pass("ui/pass/*.rs");
    cases.compile_fail("ui/fail/**/*.rs");
}
