// The routing of answers in IndexedDB, so that the colors survive a reload. localStorage keeps the
// texts, but has too little room: a token of a model with 48 layers and 8 active experts takes 1.5
// kB. Without IndexedDB, as in some private windows, the colors last until the page is closed.

import {Routing} from "./routing.js";

const BUDGET = 256 << 20; // bytes of all answers; the oldest go first
const [TRACES, SIZES] = ["traces", "sizes"];

let opened = null;

/** Return the database, or null if the browser blocks it. */
function open() {
  opened ??= new Promise(resolve => {
    try {
      const request = indexedDB.open("moe-fast", 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore(TRACES);
        request.result.createObjectStore(SIZES, {keyPath: "id"});
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

/** Run `use` in a transaction; return the value of the request that it returns, or null. */
async function transact(mode, use) {
  const database = await open();
  if (!database) return null;
  return new Promise(resolve => {
    const transaction = database.transaction([TRACES, SIZES], mode);
    const request = use(transaction.objectStore(TRACES), transaction.objectStore(SIZES));
    transaction.oncomplete = () => resolve(request?.result ?? null);
    transaction.onabort = transaction.onerror = () => resolve(null); // full, or closed
  });
}

/** Keep the routing of an answer. */
export async function saveTrace(id, routing) {
  const packed = routing.pack();
  const size = {id, bytes: packed.chosen.byteLength + packed.weights.byteLength, saved: Date.now()};
  await transact("readwrite", (traces, sizes) => {
    traces.put(packed, id);
    sizes.put(size);
  });
  await makeRoom();
}

/** Remove the oldest traces over the budget. */
async function makeRoom() {
  const sizes = (await transact("readonly", (_, sizes) => sizes.getAll())) ?? [];
  let total = 0;
  const removed = sizes
    .sort((a, b) => b.saved - a.saved)
    .filter((size, n) => (total += size.bytes) > BUDGET && n > 0);
  if (removed.length) await remove(removed.map(size => size.id));
}

const remove = ids =>
  transact("readwrite", (traces, sizes) => {
    for (const id of ids) {
      traces.delete(id);
      sizes.delete(id);
    }
  });

/** Return the Routing of an answer, or null if it is not kept. */
export async function loadTrace(id) {
  return Routing.unpack(await transact("readonly", traces => traces.get(id)));
}

/** Remove the routings of answers that no chat has. */
export async function keepTraces(ids) {
  const kept = (await transact("readonly", (_, sizes) => sizes.getAllKeys())) ?? [];
  const gone = kept.filter(id => !ids.has(id));
  if (gone.length) await remove(gone);
}
