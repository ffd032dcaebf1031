// Versions of a message: regenerating an answer or editing a question keeps what was there.
//
// A message with versions has `branches`: the messages from it on, one list for each version, and
// null for the version that the chat shows. So each version keeps its own continuation.

/** Put `next` in place of the messages from number n on. They become a version of it. */
export function addBranch(messages, n, next) {
  const branches = leave(messages, n);
  next.branches = [...branches, null];
  messages.push(next);
}

/** Show another version of message n. at: its index in `branches`. */
export function switchBranch(messages, n, at) {
  const branches = leave(messages, n);
  const tail = branches[at];
  branches[at] = null;
  tail[0].branches = branches;
  messages.push(...tail);
}

/** Return {at, count} of a message's versions, counted from 0; {at: 0, count: 1} without any. */
export function versionOf({branches}) {
  return branches ? {at: branches.indexOf(null), count: branches.length} : {at: 0, count: 1};
}

/** Return all answers of a chat, those of other versions included. */
export function allAnswers(messages) {
  return messages.flatMap(message => [
    ...(message.role === "assistant" ? [message] : []),
    ...(message.branches ?? []).flatMap(tail => allAnswers(tail ?? [])),
  ]);
}

/** Return {message, name} of all answers: "answer 2", "answer 2, version 1". */
export function namedAnswers(messages, before = 0, version = "") {
  let number = before;
  return messages.flatMap(message => {
    const others = (message.branches ?? []).flatMap((tail, at) =>
      tail ? namedAnswers(tail, number, `${version}, version ${at + 1}`) : [],
    );
    if (message.role !== "assistant") return others;
    number++;
    return [{message, name: `answer ${number}${version}`}, ...others];
  });
}

/** Remove the messages from n on; return the branches with them in the place of null. */
function leave(messages, n) {
  const tail = messages.splice(n);
  const branches = tail[0].branches ?? [null];
  delete tail[0].branches; // a tail does not hold the list that holds it
  return branches.map(other => other ?? tail);
}
