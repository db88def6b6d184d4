"use strict";

// The link that `rlharvest up` prints ends in #token: that part of an address stays in the browser, and in no log.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // it was typed, and holds a percent sign
  }
}

const token = decoded(location.hash.slice(1));
if (token) {
  history.replaceState(null, "", location.pathname);
  document.getElementById("token").value = token;
  document.querySelector("form").submit();
}
