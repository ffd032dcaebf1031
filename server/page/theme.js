// Sets the theme before the first paint. A module would run after it, and the page would flash.
"use strict";
try {
  const theme = JSON.parse(localStorage.getItem("moe-fast:settings") || "{}").theme;
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be blocked; the system's theme is the default.
}
