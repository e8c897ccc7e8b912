// The browser's half of the page: conversations in its own storage, names for unnamed buttons,
// values under the pointer. No request is made from here.
(() => {
  "use strict";
  const PREFIX = "purestep.conversation.";
  const OPEN = "purestep.open";
  const FORMAT = "purestep.conversations";
  let redraw = () => {};

  const read = (id) => {
    try { return JSON.parse(localStorage.getItem(PREFIX + id)); } catch { return null; }
  };
  const all = () => {
    const found = [];
    for (let i = 0; i < localStorage.length; i++) {
      const key = localStorage.key(i);
      if (!key.startsWith(PREFIX)) continue;
      const item = read(key.slice(PREFIX.length));
      if (item && Array.isArray(item.messages)) found.push(item);
    }
    return found.sort((a, b) => b.updated - a.updated);
  };
  const deleted = new Set(); // an answer still being written must not bring its conversation back
  const store = (item) => {
    if (deleted.has(item.id)) return;
    try {
      localStorage.setItem(PREFIX + item.id, JSON.stringify(item));
    } catch {
      alert("The browser's storage is full: export and delete some conversations.");
    }
  };

  // --- conversations ---------------------------------------------------------------------------

  function save(text) {
    if (!text) return;
    const item = JSON.parse(text);
    if (item.format === FORMAT) {
      item.conversations.forEach((one) => store(one));
    } else {
      sessionStorage.setItem(OPEN, item.id);
      if (item.messages.length || read(item.id)) store(item);
    }
    redraw();
  }

  function restore() {
    const id = sessionStorage.getItem(OPEN);
    return (id && localStorage.getItem(PREFIX + id)) || "";
  }

  function download() {
    const content = JSON.stringify({ format: FORMAT, version: 1, conversations: all() }, null, 1);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
    link.download = "purestep-conversations.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "onclick") node.addEventListener("click", value);
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  function list(element, events) {
    const items = make("ul", { class: "talks", "aria-label": "Conversations" });
    const file = make("input", { type: "file", accept: "application/json,.json", hidden: "" });
    file.addEventListener("change", async () => {
      if (file.files.length) events.imported({ text: await file.files[0].text() });
      file.value = "";
    });
    const tools = make("div", { class: "talk-tools" },
      make("button", { type: "button", id: "export-conversations", onclick: download }, "Export"),
      make("button", { type: "button", id: "import-conversations", onclick: () => file.click() },
        "Import"),
      file);
    element.replaceChildren(items, tools);

    const open = (id) => {
      sessionStorage.setItem(OPEN, id);
      events.open({ text: localStorage.getItem(PREFIX + id) || "" });
      redraw();
    };
    let doomed = null; // the conversation whose deletion waits for a second click
    const remove = (item) => {
      if (doomed !== item.id) {
        doomed = item.id;
        setTimeout(() => { if (doomed === item.id) { doomed = null; redraw(); } }, 5000);
        redraw();
        items.querySelector(".sure").focus();
        return;
      }
      doomed = null;
      deleted.add(item.id);
      localStorage.removeItem(PREFIX + item.id);
      if (sessionStorage.getItem(OPEN) === item.id) {
        sessionStorage.removeItem(OPEN);
        events.open({ text: "" });
      }
      redraw();
    };
    const rename = (item, row) => {
      const field = make("input", { type: "text", value: item.title, "aria-label": "New title" });
      let done = false;
      const finish = (keep) => {
        if (done) return;
        done = true;
        const title = field.value.trim();
        field.remove();
        if (keep && title) {
          store({ ...item, title });
          events.renamed({ id: item.id, title });
        }
        redraw();
      };
      field.addEventListener("keydown", (event) => {
        if (event.key === "Enter") finish(true);
        if (event.key === "Escape") finish(false);
      });
      field.addEventListener("blur", () => finish(true));
      row.replaceChildren(field);
      field.focus();
      field.select();
    };
    redraw = () => {
      if (items.querySelector("input")) return;
      const current = sessionStorage.getItem(OPEN);
      const rows = all().map((item) => {
        const row = make("li", item.id === current ? { class: "current" } : {});
        const title = make("button", {
          type: "button", class: "talk-title", title: item.title, onclick: () => open(item.id),
        }, item.title);
        if (item.id === current) title.setAttribute("aria-current", "true");
        const renamer = make("button", {
          type: "button", class: "talk-tool", "aria-label": `Rename ${item.title}`,
          onclick: () => rename(item, row),
        }, "✎");
        const sure = doomed === item.id;
        const remover = make("button", {
          type: "button", class: sure ? "talk-tool sure" : "talk-tool",
          "aria-label": `${sure ? "Really delete" : "Delete"} ${item.title}`,
          onclick: () => remove(item),
        }, sure ? "Delete?" : "✕");
        row.append(title, renamer, remover);
        return row;
      });
      if (!rows.length) rows.push(make("li", { class: "none" }, "Kept in this browser only."));
      items.replaceChildren(...rows);
    };
    redraw();
    window.addEventListener("storage", () => redraw()); // another tab saved something
  }

  // --- accessible names ------------------------------------------------------------------------

  const NAMES = [
    ["button.submit-button, [data-testid=submit-button]", "Send"],
    ["button.stop-button", "Stop"],
    ["textarea.edit-textarea", "Edited message"],
  ];
  function name(root) {
    for (const [selector, label] of NAMES) {
      for (const node of root.querySelectorAll(selector)) {
        if (node.getAttribute("aria-label")) continue;
        node.setAttribute("aria-label", label);
        node.title = label;
      }
    }
    for (const row of root.querySelectorAll(".bot-row:has(textarea.edit-textarea)")) {
      // Gradio lets all parts of an answer be edited; reasoning and statistics are none of that.
      const parts = [...row.querySelectorAll("textarea.edit-textarea")];
      const said = parts.filter((node) => !/^Prompt: \d+ tokens?, /.test(node.value));
      for (const node of parts) node.hidden = node !== said.at(-1);
    }
    for (const button of root.querySelectorAll(".thought-group .title button")) {
      button.tabIndex = -1; // the title around it is the control
      button.setAttribute("aria-label", "Show or hide");
    }
    for (const title of root.querySelectorAll(".thought-group .title:not([aria-label])")) {
      title.setAttribute("aria-label", title.textContent.trim() || "Details");
    }
    for (const button of root.querySelectorAll("button:not([aria-label])")) {
      if (!button.textContent.trim() && button.title) {
        button.setAttribute("aria-label", button.title);
      }
    }
  }

  // --- events (see Note [lost events] in guard.py) -----------------------------------------------

  const plain = window.fetch.bind(window);
  let asked = 0; // streams of results so far
  let taken = Promise.resolve(); // until Gradio is done with the last of them

  async function results(call, signal) {
    asked += 1;
    let end;
    taken = new Promise((resolve) => { end = resolve; });
    signal.addEventListener("abort", end); // how Gradio leaves a stream that has ended
    let answer;
    try { answer = await plain(...call); } catch (error) { end(); throw error; }
    if (!answer.ok || !answer.body) { end(); return answer; }
    const reader = answer.body.getReader();
    const body = new ReadableStream({
      async pull(controller) {
        try {
          const { done, value } = await reader.read();
          if (!done) { controller.enqueue(value); return; }
          controller.close();
        } catch (error) {
          if (signal.aborted) controller.close();
          else controller.error(error);
        }
        setTimeout(end, 50); // Gradio may still have the last piece to read
      },
      cancel(reason) { end(); return reader.cancel(reason); },
    }, { highWaterMark: 0 });
    const { status, statusText, headers } = answer;
    return new Response(body, { status, statusText, headers });
  }

  window.fetch = async (...call) => {
    const request = call[0] instanceof Request ? call[0] : null;
    const url = String(request ? request.url : call[0]);
    if (request && url.includes("/queue/data?")) return results(call, request.signal);
    const answer = await plain(...call);
    if (url.includes("/queue/join")) {
      const closed = /^closed (\d+)$/.exec(answer.headers.get("x-event-stream") || "");
      // A stream that this page has asked for since then will bring the event's results.
      if (closed && Number(closed[1]) === asked) await taken;
    }
    return answer;
  };

  // --- copying (see markup.py) --------------------------------------------------------------------

  const written = (text) => text.replaceAll("\u2060", "");
  if (navigator.clipboard) { // not there on a page that is neither local nor encrypted
    const write = navigator.clipboard.writeText.bind(navigator.clipboard);
    navigator.clipboard.writeText = (text) => write(written(String(text)));
  }
  document.addEventListener("copy", (event) => {
    const text = String(getSelection());
    if (written(text) === text) return;
    event.clipboardData.setData("text/plain", written(text));
    event.preventDefault();
  });

  // --- folding panels on narrow screens -----------------------------------------------------------

  function toggle(panel) {
    const page = document.getElementById("chat-page");
    if (page) page.classList.toggle("show-" + panel);
    for (const side of ["list", "settings"]) {
      const button = document.getElementById("toggle-" + side);
      if (button) button.setAttribute("aria-expanded", page.classList.contains("show-" + side));
    }
  }

  // --- charts: the values under the pointer ---------------------------------------------------------

  function hover(event) {
    const chart = event.target.closest && event.target.closest("svg.chart");
    for (const other of document.querySelectorAll("svg.chart .cursor")) {
      if (!chart || !chart.contains(other)) other.setAttribute("visibility", "hidden");
    }
    if (!chart) return;
    const data = JSON.parse(chart.dataset.points);
    const box = chart.getBoundingClientRect();
    const view = chart.viewBox.baseVal;
    const x = ((event.clientX - box.left) / box.width) * view.width;
    const at = Math.round(((x - data.x0) / (data.x1 - data.x0)) * (data.times.length - 1));
    const i = Math.min(data.times.length - 1, Math.max(0, at));
    const cursor = chart.querySelector(".cursor");
    const px = data.x0 + (i / Math.max(1, data.times.length - 1)) * (data.x1 - data.x0);
    cursor.setAttribute("visibility", "visible");
    cursor.querySelector("line").setAttribute("x1", px);
    cursor.querySelector("line").setAttribute("x2", px);
    const label = cursor.querySelector("text");
    const right = px > (data.x0 + data.x1) / 2;
    label.setAttribute("x", right ? px - 6 : px + 6);
    label.setAttribute("text-anchor", right ? "end" : "start");
    label.textContent = [data.times[i], ...data.texts[i]].join("  ·  ");
  }

  function tokenDetail(target) {
    const token = target.closest && target.closest(".token[data-detail]");
    const panel = token && token.closest(".tokens-box").querySelector(".token-detail");
    if (!panel) return;
    const detail = JSON.parse(token.dataset.detail);
    const shown = (text) => text.replaceAll("\n", "↵").replaceAll(" ", "·") || "∅";
    const rows = detail.top.map(([text, share]) =>
      make("li", text === detail.text ? { class: "chosen" } : {},
        make("code", {}, shown(text)),
        make("span", { class: "share" }, make("i", { style: `width:${Math.min(100, share)}%` })),
        make("span", {}, `${share.toFixed(share < 10 ? 1 : 0)} %`)));
    panel.replaceChildren(make("ol", {}, ...rows));
  }

  function walk(event) {
    const token = event.target.closest && event.target.closest(".token");
    if (!token) return;
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    let next = step && token[step];
    while (next && !next.classList.contains("token")) next = next[step];
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  // --- the end of the conversation stays in view, unless the reader has scrolled up -----------------

  let view = null;
  let follows = true;
  let questions = 0;
  let top = 0;
  function scrolled() {
    const below = view.scrollHeight - view.clientHeight - view.scrollTop;
    if (below < 40) follows = true;
    else if (view.scrollTop < top) follows = false;
    top = view.scrollTop;
  }
  function follow() {
    const now = document.querySelector("#bot .bubble-wrap");
    if (!now) return;
    if (now !== view) {
      view = now;
      follows = true;
      view.addEventListener("scroll", scrolled, { passive: true });
    }
    const count = view.querySelectorAll("[data-testid=user]").length;
    if (count !== questions) follows = true; // asked, or another conversation
    questions = count;
    if (follows) view.scrollTop = view.scrollHeight;
  }

  function leaveEdit(event) {
    if (event.key !== "Escape" || !event.target.matches("textarea.edit-textarea")) return;
    const cancel = document.querySelector("#bot button[aria-label=Cancel]");
    if (cancel) cancel.click();
    document.querySelector("#msg textarea").focus();
  }

  function start() {
    const observer = new MutationObserver(() => {
      if (observer.due) return;
      observer.due = requestAnimationFrame(() => { observer.due = 0; name(document.body); follow(); });
    });
    observer.observe(document.body, { childList: true, subtree: true });
    name(document.body);
    document.addEventListener("pointermove", hover, { passive: true });
    document.addEventListener("pointerover", (event) => tokenDetail(event.target));
    document.addEventListener("focusin", (event) => tokenDetail(event.target));
    document.addEventListener("keydown", walk);
    document.addEventListener("keydown", leaveEdit);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();

  window.purestep = { save, restore, list, toggle };
})();
