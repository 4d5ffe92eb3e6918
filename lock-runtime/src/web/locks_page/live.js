// Replaces the content of the page when the server says that it has changed.
"use strict";

const state = document.getElementById("state");
const events = new EventSource(document.currentScript.src.replace(/live\.js$/, "events"));
let loading = false;
let again = false;

function load() {
  if (loading) {
    again = true;
    return;
  }
  loading = true;
  const request = new XMLHttpRequest();
  // Parses the page without a sink that a content policy may refuse.
  request.responseType = "document";
  request.open("GET", location.href);
  request.onload = () => {
    const next = request.response && request.response.querySelector("main");
    if (request.status === 200 && next) {
      document.querySelector("main").replaceWith(document.importNode(next, true));
    }
  };
  request.onloadend = () => {
    loading = false;
    if (again) {
      again = false;
      load();
    }
  };
  request.send();
}

events.addEventListener("changed", load);
events.onopen = () => {
  state.textContent = "live";
  load();
};
events.onerror = () => {
  state.textContent = "not connected";
};
