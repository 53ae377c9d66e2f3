/**
 * What happens when: a heap of events in typed arrays, so that a million jobs are simulated in
 * seconds. At one instant the smaller kind comes first; of a kind, the one that was added first.
 */
export class Events {
  /** Those left. */
  size = 0;
  /** The event of the last {@linkcode next}. */
  atS = 0;
  kind = 0;
  ref = 0;
  token = 0;

  #added = 0;
  #times = new Float64Array(64);
  /** Kind and number in one, to be compared at once. */
  #orders = new Float64Array(64);
  #refs = new Int32Array(64);
  #tokens = new Int32Array(64);

  /** When the next one is due; Infinity when there is none. */
  get nextS(): number {
    return this.size > 0 ? this.#times[0] : Infinity;
  }

  /**
   * @param ref whom it concerns
   * @param token tells whether it still does
   */
  add(atS: number, kind: number, ref = 0, token = 0): void {
    if (this.size === this.#times.length) this.#grow();
    const order = kind * 2 ** 45 + this.#added++;
    let at = this.size++;
    while (at > 0) {
      const parent = (at - 1) >> 1;
      if (!this.#isBefore(atS, order, parent)) break;
      this.#move(parent, at);
      at = parent;
    }
    this.#put(at, atS, order, ref, token);
  }

  /** Takes the next event, to be read from the fields. @returns whether there was one */
  next(): boolean {
    if (this.size === 0) return false;
    this.atS = this.#times[0];
    this.kind = Math.floor(this.#orders[0] / 2 ** 45);
    this.ref = this.#refs[0];
    this.token = this.#tokens[0];
    const last = --this.size;
    const [atS, order] = [this.#times[last], this.#orders[last]];
    let at = 0;
    for (;;) {
      let child = 2 * at + 1;
      if (child >= last) break;
      if (
        child + 1 < last &&
        this.#isBefore(this.#times[child + 1], this.#orders[child + 1], child)
      ) child++;
      if (this.#isBefore(atS, order, child)) break;
      this.#move(child, at);
      at = child;
    }
    this.#put(at, atS, order, this.#refs[last], this.#tokens[last]);
    return true;
  }

  #isBefore(atS: number, order: number, other: number): boolean {
    const otherS = this.#times[other];
    return atS < otherS || (atS === otherS && order < this.#orders[other]);
  }

  #move(from: number, to: number): void {
    this.#put(to, this.#times[from], this.#orders[from], this.#refs[from], this.#tokens[from]);
  }

  #put(at: number, atS: number, order: number, ref: number, token: number): void {
    this.#times[at] = atS;
    this.#orders[at] = order;
    this.#refs[at] = ref;
    this.#tokens[at] = token;
  }

  #grow(): void {
    const longer = <T extends Float64Array | Int32Array>(old: T, fresh: T): T => {
      fresh.set(old);
      return fresh;
    };
    const length = 2 * this.size;
    this.#times = longer(this.#times, new Float64Array(length));
    this.#orders = longer(this.#orders, new Float64Array(length));
    this.#refs = longer(this.#refs, new Int32Array(length));
    this.#tokens = longer(this.#tokens, new Int32Array(length));
  }
}
