/** Waiting, for tests without a database too. */

/**
 * Asks every 20 ms until `condition` is truthy, and returns what it was. Fails, naming `what`,
 * when that is not so within `timeoutMs`; an error of the condition's own fails at once.
 */
export async function waitFor<T>(
  condition: () => T | Promise<T>,
  what: string,
  { timeoutMs = 40_000 }: { timeoutMs?: number } = {},
): Promise<Exclude<T, undefined | null | false | 0 | "">> {
  const deadline = performance.now() + timeoutMs;
  for (;;) {
    const value = await condition();
    if (value) return value as Exclude<T, undefined | null | false | 0 | "">;
    if (performance.now() > deadline) throw new Error(`Waited ${timeoutMs} ms for ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
