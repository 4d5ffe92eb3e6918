// Replaces the tables of the page when the server says that they have changed.
"use strict";

const state = document.getElementById("state");
const source = document.currentScript.src.replace(/live\.js$/, "events");
let events = null;
let loading = false;
let again = false;
let silence = 0;

function show(text) {
  if (state.textContent !== text) {
    state.textContent = text;
  }
}

// Text that is being selected stays.
function isSelected(element) {
  const selection = getSelection();
  return selection && !selection.isCollapsed && selection.containsNode(element, true);
}

function load() {
  const main = document.querySelector("main");
  if (loading || isSelected(main)) {
    again = true;
    return;
  }
  loading = true;
  const request = new XMLHttpRequest();
  // Parses the page without a sink that a content policy may refuse.
  request.responseType = "document";
  request.timeout = 10000;
  // Without the lookup, which stays as it is.
  request.open("GET", location.pathname);
  request.onload = () => {
    const next = request.response && request.response.querySelector("main");
    if (request.status === 200 && next && request.response.getElementById("state")) {
      main.replaceWith(document.importNode(next, true));
      show("live");
    } else {
      show("not loaded: status " + request.status);
    }
  };
  request.onerror = request.ontimeout = () => show("not loaded: no answer");
  request.onloadend = () => {
    loading = false;
    if (again) {
      again = false;
      load();
    }
  };
  request.send();
}

function connect() {
  if (events && events.readyState !== EventSource.CLOSED) {
    return;
  }
  events = new EventSource(source);
  events.addEventListener("changed", load);
  events.onopen = () => {
    clearTimeout(silence);
    load();
  };
  // A stream ends now and then, and the browser connects again within a second.
  events.onerror = () => {
    clearTimeout(silence);
    silence = setTimeout(() => show("not connected"), 5000);
    if (events.readyState === EventSource.CLOSED) {
      setTimeout(() => document.hidden || connect(), 5000);
    }
  };
}

document.addEventListener("selectionchange", () => {
  if (again && !isSelected(document.querySelector("main"))) {
    again = false;
    load();
  }
});
// A hidden page needs no connection.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(silence);
    events.close();
  } else if (events.readyState === EventSource.CLOSED) {
    connect();
  }
});
connect();
