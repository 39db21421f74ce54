/* Once one page has signed out, every other page of the console in this browser leads to the sign-in page. */
(() => {
  "use strict";
  const channel = new BroadcastChannel("sign-out");
  if (location.pathname !== "/console/sign-in") {
    channel.onmessage = () => location.replace(location.pathname + location.search);
  } else if (location.search === "?signed-out") {
    channel.postMessage("");
  }
})();
