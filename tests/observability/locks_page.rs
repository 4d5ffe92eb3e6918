//! The page of the held locks, on axum and on actix-web, and in a browser.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use axum::Router;
use lock_runtime::web::LocksPage;
use lock_runtime::{LockError, LockPool, distributed_lock, serve_until};
use lock_tests::browser::Browser;
use lock_tests::prelude::*;
use lock_tests::{RedisServer, Worker, eventually_async, example, http};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::seen::{Traced, watch};

const SOON: Duration = ms(30_000);

/// A server with the page of `pool` at `/ops/locks`, until the test ends.
async fn axum_with(pool: &LockPool) -> SocketAddr {
    axum_serves(LocksPage::new().pool(pool)).await
}

async fn axum_serves(page: LocksPage) -> SocketAddr {
    let routes = Router::new().nest("/ops/locks", page.into_router());
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, routes).await.unwrap() });
    address
}

/// As [`axum_with`].
fn actix_with(pool: &LockPool) -> SocketAddr {
    actix_serves(LocksPage::new().pool(pool))
}

fn actix_serves(page: LocksPage) -> SocketAddr {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        actix_web::rt::System::new().block_on(async {
            let app = move || actix_web::App::new().service(page.clone().into_scope("/ops/locks"));
            let server = actix_web::HttpServer::new(app).workers(1).disable_signals();
            server.listen(listener).unwrap().run().await.unwrap();
        });
    });
    address
}

async fn get(address: SocketAddr, path: &str) -> (u16, String, String) {
    within(SOON, path, http::request(address, "GET", path, "")).await.unwrap()
}

#[distributed_lock(key = "order:<id>", pool = pool, guard = lock)]
async fn settle(pool: &LockPool, id: &str, until: oneshot::Receiver<()>) -> Result<(), LockError> {
    assert!(lock.fence().is_some());
    let _ = until.await;
    Ok(())
}

#[tokio::test]
async fn both_frameworks_serve_the_page_its_files_and_a_lookup() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let other = LockPool::connect(&server.url()).await.unwrap();
    let elsewhere = other.lock("held & <elsewhere>").acquire().await.unwrap();
    for address in [axum_with(&pool).await, actix_with(&pool)] {
        let (_, _, empty) = get(address, "/ops/locks").await;
        assert!(empty.contains("0 held, 0 with waiting tasks"), "{empty}");

        let (end, until) = oneshot::channel();
        let held = tokio::spawn({
            let pool = pool.clone();
            async move { settle(&pool, "<b>&", until).await }
        });
        let is_held = async || pool.snapshot().held.len() == 1;
        eventually_async(SOON, "the lock is held", is_held).await;
        let (status, head, page) = get(address, "/ops/locks").await;
        assert_eq!(status, 200, "{page}");
        assert!(head.contains("content-type: text/html; charset=utf-8"), "{head}");
        assert!(head.contains("cache-control: no-store"), "{head}");
        // Under `no-referrer` a browser would send the page's own form without its origin.
        assert!(head.contains("referrer-policy: same-origin"), "{head}");
        assert!(head.contains("default-src 'none'; style-src 'self'"), "{head}");
        let owner = pool.snapshot().held[0].owner.to_string();
        for shown in ["1 held", "<code>order:%3Cb%3E&amp;</code>", "locks_page::settle", &owner] {
            assert!(page.contains(shown), "{shown}: {page}");
        }
        assert!(!page.contains("<b>") && !page.contains("<script>"), "{page}");

        // Held by another process: only the store knows.
        let (_, _, page) = get(address, "/ops/locks?key=held+%26+%3Celsewhere%3E&pool=0").await;
        let owner = other.snapshot().held[0].owner.to_string();
        assert!(page.contains("<h2>held &amp; &lt;elsewhere&gt;</h2>"), "{page}");
        assert!(page.contains(&owner) && page.contains("expires in"), "{page}");
        let process = format!("/{}</code>", std::process::id());
        assert!(page.contains("<dt>process</dt>") && page.contains(&process), "{page}");
        let (_, _, page) = get(address, "/ops/locks?key=free").await;
        assert!(page.contains("none, the key is free"), "{page}");
        // In the heading, the field and the text of the error.
        let (_, _, page) = get(address, "/ops/locks?key=lock_runtime:%E2%80%AE").await;
        assert!(page.contains("<p class=\"error\">") && page.contains("\\u{202e}"), "{page}");
        assert!(!page.contains('\u{202e}') && page.contains("value=\"\""), "{page}");
        let (_, _, page) = get(address, "/ops/locks?key=free&pool=1").await;
        assert!(page.contains("No pool of this name"), "{page}");

        for (file, kind) in [("style.css", "text/css"), ("live.js", "text/javascript")] {
            assert!(page.contains(&format!("\"./locks/{file}\"")), "{page}");
            let (status, head, text) = get(address, &format!("/ops/locks/{file}")).await;
            assert_eq!(status, 200, "{head}");
            assert!(head.contains(&format!("content-type: {kind}")) && !text.is_empty(), "{head}");
        }
        end.send(()).unwrap();
        held.await.unwrap().unwrap();
    }
    elsewhere.release().await.unwrap();
}

#[tokio::test]
async fn a_store_that_is_down_is_an_error_on_the_page() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).request_timeout(ms(500)).connect().await.unwrap();
    let address = axum_with(&pool).await;
    server.kill();
    let (status, _, page) = get(address, "/ops/locks?key=order:1").await;
    assert_eq!(status, 200);
    assert!(page.contains("<p class=\"error\">") && page.contains("0 held"), "{page}");
}

/// The user that a proxy in front has logged in.
const USER: &str = "x-user";

#[tokio::test]
async fn operators_alone_take_a_lock_from_the_holder_that_the_page_shows() {
    watch();
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    lock_runtime::install("page", pool.clone()).unwrap();
    let other = LockPool::builder(server.url()).ttl(ms(3_000)).connect().await.unwrap();
    let page = || LocksPage::new().pool(&pool);
    let guarded = || page().allow_release(|request| request.header(USER).map(str::to_owned));
    let path = "/ops/locks?pool=0&key=order%3A1";
    let send = async |address, method, headers: &[(&str, &str)], form: &str| {
        let sent = http::request_with(address, method, path, headers, form);
        within(SOON, "a response", sent).await.unwrap()
    };
    let alice = (USER, "alice");
    let servers = [
        (axum_serves(page()).await, axum_serves(guarded()).await),
        (actix_serves(page()), actix_serves(guarded())),
    ];
    for (round, (read_only, address)) in servers.into_iter().enumerate() {
        let (enter, entered) = oneshot::channel();
        let body = tokio::spawn(other.lock("order:1").run(async move {
            enter.send(()).unwrap();
            std::future::pending::<()>().await;
        }));
        within(SOON, "the body begins", entered).await.unwrap();
        let owner = other.snapshot().held[0].owner.to_string();
        let form = format!("pool_name=page&owner={owner}");

        let button = "Release by force";
        for (address, headers) in [(read_only, &[alice][..]), (address, &[])] {
            let (status, _, text) = send(address, "GET", headers, "").await;
            assert!(status == 200 && text.contains(&owner) && !text.contains(button), "{text}");
        }
        let (_, _, text) = send(address, "GET", &[alice], "").await;
        assert!(text.contains(button) && text.contains(&format!("value=\"{owner}\"")), "{text}");

        let refused = [
            (read_only, &[alice][..], 405),
            (address, &[], 403),
            (address, &[alice, ("sec-fetch-site", "cross-site")], 403),
            (address, &[alice, ("origin", "http://evil.example")], 403),
        ];
        for (address, headers, expected) in refused {
            let (status, _, text) = send(address, "POST", headers, &form).await;
            // The router of actix-web has no route for the method.
            let expected = if expected == 405 && round == 1 { 404 } else { expected };
            assert_eq!(status, expected, "{headers:?}: {text}");
        }
        for other_owner in ["", "&owner=", "&owner=0123"] {
            let form = format!("pool_name=page{other_owner}");
            let (_, _, text) = send(address, "POST", &[alice], &form).await;
            assert!(text.contains("no longer has the lock"), "{form}: {text}");
        }
        // Another pool has taken the place on the page.
        let (_, _, text) = send(address, "POST", &[alice], &form.replace("page", "jobs")).await;
        assert!(text.contains("No pool of this name"), "{text}");
        let (status, ..) = send(address, "POST", &[alice], &"x".repeat(20_000)).await;
        assert_eq!(status, 413);
        assert_eq!(
            pool.inspect("order:1").await.unwrap().holder.unwrap().owner.unwrap().to_string(),
            owner
        );

        let same = [alice, ("origin", "http://localhost"), ("sec-fetch-site", "same-origin")];
        let (status, _, text) = send(address, "POST", &same, &form).await;
        assert!(status == 200 && text.contains("taken from its holder"), "{text}");
        assert!(text.contains("the key is free") && !text.contains(button), "{text}");
        let error = joined("the end of the body", body).await.unwrap_err();
        assert!(error.is_lost(), "{error}");
        // Sent again, by a reload of the page.
        let (_, _, text) = send(address, "POST", &same, &form).await;
        assert!(text.contains("no longer has the lock"), "{text}");

        let traced = Traced::of("page").await_events("released by force", round + 1).await;
        let forced = traced.all("released by force");
        let by = &forced[round].fields["by"];
        assert!(
            by.starts_with("alice at ") && by.ends_with(&std::process::id().to_string()),
            "{by}"
        );
    }
}

/// Reads the stream until it has told so many changes.
async fn read_changes(stream: &mut TcpStream, count: usize) -> String {
    let mut text = String::new();
    within(SOON, "events", async {
        while text.matches("event: changed").count() < count {
            let mut chunk = [0; 1024];
            let read = stream.read(&mut chunk).await.unwrap();
            assert!(read > 0, "the stream ends: {text}");
            text.push_str(&String::from_utf8_lossy(&chunk[..read]));
        }
    })
    .await;
    text
}

#[tokio::test]
async fn grants_and_releases_are_events_of_the_stream() {
    let pool = memory().await;
    for address in [axum_with(&pool).await, actix_with(&pool)] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = "GET /ops/locks/events HTTP/1.1\r\nhost: localhost\r\n\r\n";
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 64];
        within(SOON, "the head", stream.read(&mut head)).await.unwrap();
        let guard = pool.lock("k").acquire().await.unwrap();
        read_changes(&mut stream, 1).await;
        guard.release().await.unwrap();
        // At most one more for the times while it was held.
        read_changes(&mut stream, 1).await;
    }
}

/// In a process of its own: the shutdown is that of all pools.
#[test]
fn an_open_stream_does_not_delay_the_shutdown() {
    let name = concat!(module_path!(), "::an_open_stream_does_not_delay_the_shutdown");
    lock_tests::in_own_process(name, || {
        lock_tests::runtimes::multi_thread().block_on(async {
            let routes = Router::new().nest("/locks", LocksPage::new().into_router());
            let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let request = "GET /locks/events HTTP/1.1\r\nhost: localhost\r\n\r\n";
            stream.write_all(request.as_bytes()).await.unwrap();
            let (stop, stopped) = oneshot::channel::<()>();
            let signal = async { drop(stopped.await) };
            let served = tokio::spawn(serve_until(signal, 10 * SOON, |stopped| async {
                axum::serve(listener, routes).with_graceful_shutdown(stopped).await
            }));
            let mut head = [0; 64];
            within(SOON, "the head", stream.read(&mut head)).await.unwrap();
            stop.send(()).unwrap();
            // The stream would end by itself after 20 s.
            let served = within(ms(15_000), "the server ends", served).await.unwrap().unwrap();
            assert!(served.output.is_some(), "within the grace");
        });
    });
}

mod browser {
    use super::*;

    /// The text of the page's main part.
    async fn shown(browser: &Browser) -> String {
        let text = browser.run("return document.querySelector('main').innerText").await;
        text.as_str().unwrap().to_owned()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_new_holder_appears_and_a_former_one_goes_without_a_reload() {
        let pool = memory().await;
        let browser = Browser::start(1200, 800).await;
        for address in [axum_with(&pool).await, actix_with(&pool)] {
            browser.open(&format!("http://{address}/ops/locks")).await;
            browser.run("window.loadedOnce = true").await;
            // On a busy machine the browser itself takes seconds now and then.
            let mut shown_after = SOON;
            while shown_after >= ms(1_000) {
                let guard = pool.lock("order:42").acquire().await.unwrap();
                let waiting = acquire_in_task(&pool, "order:42");
                let began = Instant::now();
                let is_shown = async || {
                    let text = shown(&browser).await;
                    text.contains("order:42") && text.contains("1 held, 1 with waiting tasks")
                };
                eventually_async(SOON, "the holder is shown", is_shown).await;
                shown_after = began.elapsed();
                if let Some(folder) = std::env::var_os("LOCK_TEST_PICTURES") {
                    browser.save_picture(&Path::new(&folder).join("locks-page.png")).await;
                }
                let holder = pool.inspect("order:42").await.unwrap().holder.unwrap();
                assert!(pool.force_release("order:42", &holder).await.unwrap());
                assert!(guard.lost().await.is_lost());
                joined("the waiter", waiting).await.1.release().await.unwrap();
                let is_gone = async || !shown(&browser).await.contains("order:42");
                eventually_async(SOON, "the lost holder has gone", is_gone).await;
            }
            println!("shown after {shown_after:?}");
            assert_eq!(browser.run("return window.loadedOnce").await, json!(true));
            assert_eq!(
                browser.run("return document.getElementById('state').innerText").await,
                json!("live")
            );
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_lock_is_taken_from_its_holder_by_two_clicks() {
        let pool = memory().await;
        let guard = pool.lock("order:42").acquire().await.unwrap();
        let page = LocksPage::new().pool(&pool).allow_release(|_| Some("alice".to_owned()));
        let address = axum_serves(page).await;
        let browser = Browser::start(1200, 800).await;
        browser.open(&format!("http://{address}/ops/locks?key=order%3A42")).await;
        let is_sent = "return document.querySelector('form[method=post]').checkValidity()";
        assert_eq!(browser.run(is_sent).await, json!(false), "the box is not ticked");
        browser
            .run("document.querySelector('form[method=post] input[type=checkbox]').click()")
            .await;
        if let Some(folder) = std::env::var_os("LOCK_TEST_PICTURES") {
            browser.save_picture(&Path::new(&folder).join("locks-page-release.png")).await;
        }
        browser.run("document.querySelector('form[method=post] button').click()").await;
        assert!(within(SOON, "the loss", guard.lost()).await.is_lost());
        let is_told = async || {
            let text = browser.run("return document.body.innerText").await;
            text.as_str().unwrap().contains("taken from its holder")
        };
        eventually_async(SOON, "the page tells it", is_told).await;
    }

    /// The example shows its held locks and the functions that hold them, and stops in time with an open page.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_example_shows_its_workers() {
        let server = RedisServer::start();
        let worker = Worker::start(&example("dashboard"), &[&server.url(), "0"]);
        let line = worker.wait_for_line(SOON, |line| line.starts_with("open http://"));
        let browser = Browser::start(1200, 900).await;
        browser.open(line.strip_prefix("open ").unwrap()).await;
        let is_shown = async || {
            let text = shown(&browser).await;
            ["report:daily", "order:4", "dashboard::settle"].iter().all(|it| text.contains(it))
        };
        eventually_async(SOON, "the workers are shown", is_shown).await;
        if let Some(folder) = std::env::var_os("LOCK_TEST_PICTURES") {
            browser.save_picture(&Path::new(&folder).join("dashboard.png")).await;
        }
        worker.terminate();
        assert!(worker.wait_for_exit(SOON).success());
        assert_eq!(server.cli(&["KEYS", "order:*"]), "");
    }

    /// The style is applied, and nothing is wider than the window of a phone.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_page_fits_a_phone() {
        let pool = memory().await;
        let guard = pool.lock("a-rather-long-key-of-one-word:".repeat(8)).acquire().await.unwrap();
        let address = axum_with(&pool).await;
        let browser = Browser::start(500, 900).await;
        browser.open(&format!("http://{address}/ops/locks")).await;
        let widths = "const page = document.documentElement;
            return [page.scrollWidth <= page.clientWidth, getComputedStyle(document.querySelector('td')).display]";
        assert_eq!(browser.run(widths).await, json!([true, "flex"]));
        if let Some(folder) = std::env::var_os("LOCK_TEST_PICTURES") {
            browser.save_picture(&Path::new(&folder).join("locks-page-phone.png")).await;
        }
        guard.release().await.unwrap();
    }
}
